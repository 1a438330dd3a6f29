"""The victim, the attacker, and the ways to serve them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.bench.interference.chunks import expected_runs


@dataclass(frozen=True, slots=True)
class Experiment:
    """A stream that is under way, and a prompt of num_chunks chunks that comes beside it.

    num_streamed: tokens of the victim's answer; num_before: those it has had when the attacker calls.
    num_asked: tokens of the attacker's answer.
    """

    num_chunks: int = 58
    chunk: int = 128
    victim_prompt: int = 16
    num_streamed: int = 140
    num_before: int = 10
    num_asked: int = 3
    num_kv_blocks: int = 192
    block_size: int = 64

    @property
    def attacker_prompt(self) -> int:
        return self.num_chunks * self.chunk

    @property
    def settings(self) -> dict[str, int]:
        """Of every node."""
        return {
            "chunked_prefill_size": self.chunk,
            "num_kv_blocks": self.num_kv_blocks,
            "block_size": self.block_size,
            "max_num_seqs": 8,
        }

    def runs(self, every: int) -> list[int]:
        """Chunks in each of the victim's gaps at a cadence."""
        return expected_runs(self.num_chunks, every)


# As the published experiment in small: 18 chunks leave 2 over at 16, 8 and 4, as 58 do at 8 and 4.
QUICK = Experiment(num_chunks=18, num_streamed=60)


@dataclass(frozen=True, slots=True)
class Case:
    """One way to serve both. name: in JSON. flags: what one would type. every: chunks that a cadence lets pass.

    is_split: by a prefill and a decode node. has_attacker: False is the victim alone.
    """

    name: str
    flags: str
    settings: Mapping[str, int | bool] = field(default_factory=dict)
    every: int | None = None
    is_split: bool = False
    has_attacker: bool = True


def _interleave(every: int) -> Case:
    flags = f"--decode-interleave-every {every}"
    return Case(f"interleave_{every}", flags, {"decode_interleave_every": every}, every)


def _interval(rounds: int, budget: int) -> Case:
    flags = f"--prefill-decode-interval {rounds} --prefill-hold-budget {budget}"
    settings = {"prefill_decode_interval": rounds, "prefill_hold_budget": budget}
    return Case(f"interval_{rounds}", flags, settings)


ALONE = Case("alone", "the victim alone", has_attacker=False)
UNSET = Case("unset", "no policy")
SPLIT_ALONE = Case("split_alone", "prefill + decode node, the victim alone", is_split=True, has_attacker=False)
SPLIT = Case("split", "prefill + decode node", is_split=True)
# Those of a fused node with a policy. The wall of 8 is compared with that of none, so it comes first.
# A hold budget as large as the prompt could use: the default of 30 rounds would end the interval half way.
POLICIES = (
    _interleave(8),
    _interleave(16),
    _interleave(4),
    _interval(2, 1000),
    Case("mixed", "--enable-mixed-batch", {"enable_mixed_batch": True}),
)
ALL_CASES = (ALONE, UNSET, *POLICIES, SPLIT_ALONE, SPLIT)

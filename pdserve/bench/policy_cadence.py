"""The cadence: what a stream sees of a prompt of many chunks, with --decode-interleave-every and without."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random

from pdserve.bench.policy_runs import FusedNode, Model, Outcome, fused_node
from pdserve.bench.stream_checks import exactly
from pdserve.commands.measured import MeasuredAnswer, measure

NUM_CHUNKS, CHUNK = 58, 128
EVERY = 8
NUM_STREAMED = 100
# The prompt comes when the stream has had this many tokens.
NUM_BEFORE = 10
NUM_KV_BLOCKS = 160


@dataclass(frozen=True, slots=True)
class Pair:
    """A stream, and the prompt that came beside it."""

    victim: MeasuredAnswer
    attacker: MeasuredAnswer

    @property
    def chunk_s(self) -> float:
        return self.attacker.ttft_s / NUM_CHUNKS

    def num_gaps_above(self, limit_s: float) -> int:
        return sum(gap_s > limit_s for gap_s in self.victim.gaps_s)

    def figures(self, long_gap_s: float) -> dict[str, float]:
        return {
            "chunk_s": self.chunk_s,
            "long_gaps": self.num_gaps_above(long_gap_s),
            "worst_gap_s": max(self.victim.gaps_s),
            "gap_p50_s": self.victim.itl_p50_s or 0.0,
            "attacker_ttft_s": self.attacker.ttft_s,
            "wall_s": self.victim.ttft_s + sum(self.victim.gaps_s),
        }


def measure_cadence(model: Model) -> Outcome:
    unset = _serve(model, None)
    every = _serve(model, EVERY)
    half_s = EVERY * every.chunk_s / 2
    num_gaps = NUM_CHUNKS // EVERY
    same = every.victim.token_ids == unset.victim.token_ids
    return Outcome(
        f"the cadence: a prompt of {NUM_CHUNKS} chunks of {CHUNK} tokens beside a stream; "
        f"long = above {half_s:.2f} s, half of {EVERY} chunks",
        {"unset": unset.figures(half_s), f"--decode-interleave-every {EVERY}": every.figures(half_s)},
        [
            exactly(f"long gaps at {EVERY}", every.num_gaps_above(half_s), num_gaps),
            exactly("long gaps where it is unset", unset.num_gaps_above(half_s), 1),
            exactly("streams that got the same tokens", int(same), 1),
        ],
    )


def _serve(model: Model, every: int | None) -> Pair:
    settings = {"chunked_prefill_size": CHUNK, "num_kv_blocks": NUM_KV_BLOCKS, "decode_interleave_every": every}
    with fused_node(model, **settings) as node, ThreadPoolExecutor(1) as thread:
        has_begun = threading.Event()
        stream = thread.submit(_stream, node, model, has_begun)
        has_begun.wait()
        with node.client() as client:
            prompt = model.prompt(NUM_CHUNKS * CHUNK, Random(7))
            attacker = measure(client.stream(token_ids=prompt, max_new_tokens=1, temperature=0.0), _ignore)
        return Pair(stream.result(), attacker)


def _stream(node: FusedNode, model: Model, has_begun: threading.Event) -> MeasuredAnswer:
    num_pieces = 0

    def count(text: str) -> None:
        nonlocal num_pieces
        num_pieces += 1
        if num_pieces >= NUM_BEFORE:
            has_begun.set()

    try:
        with node.client() as client:
            prompt = model.prompt(16, Random(8))
            options = {"max_new_tokens": NUM_STREAMED, "temperature": 0.0, "ignore_eos": True}
            return measure(client.stream(token_ids=prompt, **options), count)  # type: ignore[arg-type]
    finally:
        has_begun.set()


def _ignore(text: str) -> None:
    """The one token of an answer that is asked for its time alone."""

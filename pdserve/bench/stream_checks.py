"""What must hold after many streams through a prefill and a decode node, each with what was found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from pdserve.bench.asking import Reply, Verdict
from pdserve.bench.workload import Ask
from pdserve.request import RankLoad

MAX_TIED_SHARE = 0.005
# Of a process in the second half. By then most kinds of batch have been run; what is left is the allocator's luck,
# and less than a megabyte a request.
MAX_GROWTH_MIB = 64.0


@dataclass(frozen=True, slots=True)
class Check:
    """What was found, and the bounds it must lie in, both included. low None: there is none."""

    name: str
    found: float
    low: float | None
    high: float

    @property
    def is_met(self) -> bool:
        return (self.low is None or self.low <= self.found) and self.found <= self.high

    @property
    def wanted(self) -> str:
        if self.low is None:
            return f"at most {self.high:,g}"
        return f"{self.low:,}" if self.low == self.high else f"{self.low:,} to {self.high:,}"

    def figures(self) -> dict[str, object]:
        return {**asdict(self), "is_met": self.is_met}


def exactly(name: str, found: float, wanted: float) -> Check:
    return Check(name, found, wanted, wanted)


def answer_checks(judged: Mapping[int, Verdict]) -> list[Check]:
    counts = Counter(judged.values())
    return [
        exactly("answers that differ from the fused node's", counts[Verdict.DIFFERENT], 0),
        Check("answers tied with the fused node's", counts[Verdict.TIED], 0, int(MAX_TIED_SHARE * len(judged))),
    ]


def place_checks(asks: Sequence[Ask], replies: Mapping[int, Reply], decode: RankLoad) -> list[Check]:
    """Where prompts were computed. A caller who gave up without a token may have done so before anything began."""
    finished = [reply for reply in replies.values() if reply.finish is not None]
    num_unbegun = sum(reply.finish is None and not reply.token_ids for reply in replies.values())
    num_remote = sum(reply.placement.startswith("remote") for reply in finished)
    counters = decode.counters
    return [
        Check("finished answers", len(finished), sum(ask.cancel is None for ask in asks), len(asks)),
        exactly("finished answers prefilled remotely", num_remote, len(finished)),
        Check("remote prefills", counters["remote_prefills_total"], len(asks) - num_unbegun, len(asks)),
        exactly("fallbacks", counters["decode_fallback_total"], 0),
        exactly("prompt tokens computed on the decode node", counters["prompt_tokens_computed"], 0),
    ]


def byte_checks(
    asks: Sequence[Ask], replies: Mapping[int, Reply], decode: RankLoad, block_size: int, block_bytes: int
) -> list[Check]:
    """What crossed: every block once, less those the decode node had; of a prompt given up perhaps none."""
    num_blocks = {ask.number: -(-len(ask.prompt) // block_size) for ask in asks}
    num_needed = sum(num_blocks[number] for number, reply in replies.items() if reply.finish is not None)
    num_had = decode.counters["prefix_hit_tokens"] // block_size
    num_moved = decode.counters["kv_descriptors_total"]
    return [
        Check("KV blocks moved", num_moved, num_needed - num_had, sum(num_blocks.values())),
        exactly("KV bytes moved", decode.counters["kv_bytes_total"], num_moved * block_bytes),
    ]


def rest_checks(prefill: RankLoad, decode: RankLoad) -> list[Check]:
    """Everything is given back on both sides."""
    return [
        exactly(f"{node} node: {name}", count, 0)
        for node, load in (("prefill", prefill), ("decode", decode))
        for name, count in in_use(load).items()
    ]


def in_use(load: RankLoad) -> dict[str, int]:
    """What must be zero when nobody asks for anything."""
    return {
        "running": load.num_running,
        "waiting": load.num_waiting,
        "held blocks": load.num_held_blocks,
        "live leases": load.num_live_leases,
        "quarantined blocks": load.num_quarantined_blocks,
        "open transfers": load.num_open_transfers,
        "open pulls": load.counters["open_pulls"],
        "open reads": load.counters["open_reads"],
    }


def growth_checks(resident_mib: Mapping[str, Sequence[float]], slab_mib: float) -> list[Check]:
    """resident_mib: of each process before the first half, between the halves, and after the second.

    A rank's slab is memory from the start and resident where it was written: what the first half left of it is allowed.
    """
    checks = []
    for name, (before, between, after) in resident_mib.items():
        unwritten = max(0.0, before + slab_mib - between) if name.endswith("rank") else 0.0
        grown = round(after - between, 1)
        checks.append(Check(f"{name}: MiB grown in the second half", grown, None, MAX_GROWTH_MIB + round(unwritten, 1)))
    return checks

"""What a run came to, over all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from pdserve.sim.clients import Clients
from pdserve.sim.rank import Rank

# Not a sum: of several ranks it is the largest.
WORST = "gate_worst_wait_rounds"


@dataclass(frozen=True, slots=True)
class Totals:
    """seconds: what the clock read at the end. is_complete: every request that called has ended.

    counters: scheduler/counters.py's and engine/gating.py's by their names, summed over ranks, but for the worst wait.
    num_group_rounds: a round of a group counts once. num_handoff_bytes: of KV committed; num_tier_bytes: copied to and
    from hosts and files. num_fallbacks: prompts that no peer would prefill. mean_occupancy: share of all blocks that
    live requests held, over time; peak_occupancy: the most that one rank's did.
    """

    seconds: float
    is_complete: bool
    num_requests: int
    num_ended: int
    num_failed: int
    peak_live: int
    counters: dict[str, int]
    num_group_rounds: int
    num_handoff_bytes: int
    num_tier_bytes: int
    num_fallbacks: int
    mean_occupancy: float
    peak_occupancy: float


@dataclass(frozen=True, slots=True)
class Moved:
    """See Totals."""

    num_handoff_bytes: int
    num_tier_bytes: int
    num_fallbacks: int


def totals_of(now_s: float, clients: Clients, ranks: Sequence[Rank], num_group_rounds: int, moved: Moved) -> Totals:
    """The sums, as of now."""
    return Totals(
        seconds=now_s,
        is_complete=clients.num_live == 0,
        num_requests=clients.num_called,
        num_ended=clients.num_ended,
        num_failed=clients.num_failed,
        peak_live=clients.peak_live,
        counters=_counters(ranks),
        num_group_rounds=num_group_rounds,
        num_handoff_bytes=moved.num_handoff_bytes,
        num_tier_bytes=moved.num_tier_bytes,
        num_fallbacks=moved.num_fallbacks,
        mean_occupancy=sum(rank.occupancy.mean(now_s) for rank in ranks) / len(ranks),
        peak_occupancy=max(rank.occupancy.peak for rank in ranks),
    )


def _counters(ranks: Sequence[Rank]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for rank in ranks:
        worst = max(totals[WORST], rank.gating.counters[WORST])
        totals.update(asdict(rank.scheduler.counters))
        totals.update(rank.gating.counters)
        totals[WORST] = worst
    return dict(totals)

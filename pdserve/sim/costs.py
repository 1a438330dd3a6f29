"""What things cost: seconds of rounds, of handoffs and of copies, as numbers that a measurement or a paper gives."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.scheduler.plan import RoundPlan, Row


@dataclass(frozen=True, slots=True)
class RankCosts:
    """Seconds of one rank's round.

    prefill  prefill_fixed + sum over chunks of tokens * (prefill_token + prefill_token_context * mean context)
    decode   decode_fixed + rows * decode_row + decode_context * tokens of context of all rows
    A round with both pays the larger fixed part once. The mean context of a chunk [start, end) is (start + end) / 2.
    decode_curve: (rows, seconds) in ascending order; a round of decodes alone takes what lies between its neighbours in
    place of decode_fixed + rows * decode_row, as kernels for few rows differ; past the last, decode_row for each more.
    """

    prefill_fixed_s: float
    prefill_token_s: float
    prefill_token_context_s: float
    decode_fixed_s: float
    decode_row_s: float
    decode_context_s: float
    decode_curve: tuple[tuple[int, float], ...] = ()

    def round_s(self, plan: RoundPlan) -> float:
        """Seconds of the forward and all that is done for it; 0 for a plan without rows."""
        prefill_s = self.chunks_s(plan.prefill)
        if not plan.decode:
            return prefill_s + (self.prefill_fixed_s if plan.prefill else 0.0)
        context = sum(row.end for row in plan.decode)
        if not plan.prefill:
            return self.decode_rows_s(len(plan.decode)) + context * self.decode_context_s
        decode_s = len(plan.decode) * self.decode_row_s + context * self.decode_context_s
        return max(self.prefill_fixed_s, self.decode_fixed_s) + prefill_s + decode_s

    def decode_rows_s(self, num_rows: int) -> float:
        """Seconds of a round of decodes beside what their contexts cost."""
        curve = self.decode_curve
        if not curve:
            return self.decode_fixed_s + num_rows * self.decode_row_s
        at = bisect_left(curve, (num_rows, 0.0))
        if at == len(curve):
            return curve[-1][1] + (num_rows - curve[-1][0]) * self.decode_row_s
        if at == 0 or curve[at][0] == num_rows:
            return curve[at][1]
        (low, low_s), (high, high_s) = curve[at - 1 : at + 1]
        return low_s + (high_s - low_s) * (num_rows - low) / (high - low)

    def chunks_s(self, rows: Iterable[Row]) -> float:
        """Seconds of these chunks beside a round's fixed part."""
        return sum(
            (row.end - row.start) * (self.prefill_token_s + self.prefill_token_context_s * (row.start + row.end) / 2)
            for row in rows
        )


@dataclass(frozen=True, slots=True)
class HandoffCosts:
    """latency_s: of one message between two nodes. read_s: of one READ beside its bytes; bytes_per_s: of one rank."""

    latency_s: float
    read_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class TierCosts:
    """Bytes a second of copies between device and host, and of files; storage_latency_s: of a read before its bytes."""

    host_bytes_per_s: float
    storage_bytes_per_s: float
    storage_latency_s: float


@dataclass(frozen=True, slots=True)
class FrontCosts:
    """arrival_s: from a client's call to the rank's inbox. delivery_s: from a drawn token to its client."""

    arrival_s: float
    delivery_s: float


@dataclass(frozen=True, slots=True)
class CostModel:
    """One deployment's costs. name and source are told with every result.

    fused, prefill, decode: of a rank of a node of that kind, as a pair of nodes may share what a fused node has alone.
    noise: standard deviation of the logarithm of a round's duration, drawn by the simulation's seed; 0 = none.
    """

    name: str
    source: str
    block_size: int
    block_bytes: int
    fused: RankCosts
    prefill: RankCosts
    decode: RankCosts
    handoff: HandoffCosts
    tiers: TierCosts
    front: FrontCosts
    noise: float = 0.0

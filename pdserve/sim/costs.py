"""What things cost: seconds of rounds, of handoffs and of copies, as numbers that a measurement or a paper gives."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.scheduler.plan import RoundPlan, Row

# Points (amount, seconds) in ascending order of the amount.
Curve = tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class RankCosts:
    """Seconds of one rank's round.

    prefill  prefill_fixed + sum over chunks of tokens * (prefill_token + prefill_token_context * mean context)
    decode   decode_fixed + rows * decode_row + decode_context * tokens of context of all rows
    A round with both pays the larger fixed part once. The mean context of a chunk [start, end) is (start + end) / 2.
    prefill_curve: by the tokens of all chunks of a round, in place of prefill_fixed + tokens * prefill_token.
    decode_curve: by rows, in place of decode_fixed + rows * decode_row, for a round of decodes alone.
    Curves are there because kernels for little work differ: a round takes what lies between its neighbours on the
    curve, before the first point as much as there, and past the last prefill_token or decode_row for each more.
    """

    prefill_fixed_s: float
    prefill_token_s: float
    prefill_token_context_s: float
    decode_fixed_s: float
    decode_row_s: float
    decode_context_s: float
    prefill_curve: Curve = ()
    decode_curve: Curve = ()

    def round_s(self, plan: RoundPlan) -> float:
        """Seconds of the forward and all that is done for it; 0 for a plan without rows."""
        if not plan.decode:
            return self.prefill_s(plan.prefill) if plan.prefill else 0.0
        num_rows = len(plan.decode)
        context_s = sum(row.end for row in plan.decode) * self.decode_context_s
        if not plan.prefill:
            return self.decode_rows_s(num_rows) + context_s
        fixed_s = max(0.0, self.decode_fixed_s - self.prefill_fixed_s)
        return self.prefill_s(plan.prefill) + fixed_s + num_rows * self.decode_row_s + context_s

    def decode_rows_s(self, num_rows: int) -> float:
        """Seconds of a round of decodes beside what their contexts cost."""
        if not self.decode_curve:
            return self.decode_fixed_s + num_rows * self.decode_row_s
        return _on_curve(self.decode_curve, num_rows, self.decode_row_s)

    def prefill_tokens_s(self, num_tokens: int) -> float:
        """Seconds of a round of chunks alone beside what their contexts cost."""
        if not self.prefill_curve:
            return self.prefill_fixed_s + num_tokens * self.prefill_token_s
        return _on_curve(self.prefill_curve, num_tokens, self.prefill_token_s)

    def prefill_s(self, rows: Iterable[Row]) -> float:
        """Seconds of a round of these chunks alone."""
        num_tokens, context = 0, 0.0
        for row in rows:
            num_tokens += row.end - row.start
            context += (row.end - row.start) * (row.start + row.end) / 2
        return self.prefill_tokens_s(num_tokens) + context * self.prefill_token_context_s


def _on_curve(curve: Curve, amount: int, more_s: float) -> float:
    """more_s: for each that `amount` is past the last point."""
    at = bisect_left(curve, (amount, 0.0))
    if at == len(curve):
        return curve[-1][1] + (amount - curve[-1][0]) * more_s
    if at == 0 or curve[at][0] == amount:
        return curve[at][1]
    (low, low_s), (high, high_s) = curve[at - 1 : at + 1]
    return low_s + (high_s - low_s) * (amount - low) / (high - low)


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

"""The cost model's parts from the coefficients that were fitted."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from pdserve.bench.calibration.fit import Observation, fit
from pdserve.bench.calibration.plan import DECODE_CURVE, PREFILL_CURVE, decode_parts
from pdserve.bench.listening import Heard
from pdserve.sim.costs import Curve, HandoffCosts, RankCosts

MAD_TO_DEVIATION = 1.4826


def rank_costs(coefficients: Mapping[str, float]) -> RankCosts:
    """Those of the coefficients that are a rank's; each curve is also told as a line."""
    prefill, decode = _curve(coefficients, PREFILL_CURVE), _curve(coefficients, DECODE_CURVE)
    prefill_fixed_s, prefill_token_s = _line(prefill)
    decode_fixed_s, decode_row_s = _line(decode)
    return RankCosts(
        prefill_fixed_s=prefill_fixed_s,
        prefill_token_s=prefill_token_s,
        prefill_token_context_s=coefficients["prefill_token_context_s"],
        decode_fixed_s=decode_fixed_s,
        decode_row_s=decode_row_s,
        decode_context_s=coefficients["decode_context_s"],
        prefill_curve=prefill,
        decode_curve=decode,
    )


def _curve(coefficients: Mapping[str, float], prefix: str) -> Curve:
    return tuple(
        sorted((int(name.removeprefix(prefix)), seconds) for name, seconds in coefficients.items() if prefix in name)
    )


def _line(curve: Curve) -> tuple[float, float]:
    """Seconds of none, and of each more."""
    found = fit([Observation("", seconds, {"none": 1.0, "each": float(amount)}) for amount, seconds in curve])
    return found["none"], found["each"]


def handoff_costs(
    handoffs: Sequence[Heard],
    coefficients: Mapping[str, float],
    front_s: float,
    block_size: int,
    block_bytes: int,
    copy_bytes_per_s: float,
) -> HandoffCosts:
    """From the gaps between first and second tokens: a READ's own time and bytes, two messages, and a decode round.

    front_s: of a fused node; what the way to a first token takes beyond that is two messages. copy_bytes_per_s: of a
    plain copy, which a READ on one machine is no faster than, even where the gaps do not tell it from nothing.
    """
    seen = []
    for heard in handoffs:
        decode = Observation("", 1.0, decode_parts(1, heard.number + 1))
        num_bytes = -(-heard.number // block_size) * block_bytes
        gap_s = heard.gaps_s[0] - decode.predicted_s(coefficients)
        seen.append(Observation(f"handoff of {heard.number}", gap_s, {"way_s": 1.0, "byte_s": float(num_bytes)}))
    found = fit(seen)
    latency_s = min(max(0.0, (coefficients["front_s"] - front_s) / 2), found["way_s"] / 2)
    return HandoffCosts(latency_s, found["way_s"] - 2 * latency_s, 1 / max(found["byte_s"], 1 / copy_bytes_per_s))


def noise_of(batches_s: Sequence[Sequence[float]]) -> float:
    """Deviation of the logarithm of a round's time from its batch's median, strays left out."""
    away = [abs(math.log(gap_s / statistics.median(gaps_s))) for gaps_s in batches_s for gap_s in gaps_s if gap_s > 0]
    return MAD_TO_DEVIATION * statistics.median(away)

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest

from pdserve.bench.calibration.fit import Observation, fit
from pdserve.bench.calibration.plan import (
    DECODE_CURVE,
    PREFILL_CURVE,
    ROWS,
    CalibrationPlan,
    decode_parts,
    group_parts,
    prompt_parts,
)
from pdserve.errors import InternalError

POINTS = CalibrationPlan().prefill_points
TRUE = {
    **{f"{PREFILL_CURVE}{tokens}": 0.012 + 0.0011 * tokens + 0.05 * (tokens < 100) for tokens in POINTS},
    "prefill_token_context_s": 4e-7,
    **{f"{DECODE_CURVE}{rows}": 0.02 + 0.002 * rows + 0.01 * (4 <= rows < 16) for rows in ROWS},
    "decode_context_s": 3e-6,
    "front_s": 0.005,
}


def observations(coefficients: dict[str, float], noise: float = 0.0) -> list[Observation]:
    """Everything that a fused node is asked in a calibration."""
    plan, random = CalibrationPlan(), Random(1)
    parts = [{**prompt_parts(length, plan.chunk, POINTS), "front_s": 1.0} for length in plan.lengths]
    parts += [{**prompt_parts(length, plan.other_chunk, POINTS), "front_s": 1.0} for length in plan.other_lengths]
    parts += [group_parts(*group, POINTS) for group in plan.groups]
    parts += [decode_parts(batch.rows, batch.prompt + 10) for batch in plan.batches]
    return [
        Observation(
            "", sum(coefficients[name] * amount for name, amount in part.items()) * random.gauss(1, noise), part
        )
        for part in parts
    ]


def test_the_plan_tells_every_coefficient_apart() -> None:
    assert fit(observations(TRUE)) == pytest.approx(TRUE)


def test_three_percent_of_noise_moves_predictions_by_less_than_the_tolerances() -> None:
    found = fit(observations(TRUE, noise=0.03))
    worst = max(abs(seen.error(found)) for seen in observations(TRUE))
    assert worst < 0.08
    assert found["prefill_tokens_512"] == pytest.approx(TRUE["prefill_tokens_512"], rel=0.05)


def test_what_would_be_negative_is_zero_and_the_rest_is_fitted_without_it() -> None:
    crooked = {**TRUE, "decode_context_s": -1e-6}
    found = fit(observations(crooked))
    assert found["decode_context_s"] == 0.0
    assert min(found.values()) >= 0.0
    assert found["prefill_tokens_512"] == pytest.approx(TRUE["prefill_tokens_512"])


def test_where_dropping_one_makes_another_negative_the_best_of_all_is_found() -> None:
    """Against every subset of coefficients, tried one by one."""
    random = Random(5)
    for _ in range(40):
        seen = [Observation("", 1.0, {name: random.uniform(-1, 1) for name in "abcd"}) for _ in range(7)]
        assert squared_error(seen, fit(seen)) == pytest.approx(least_squared_error(seen))


def squared_error(seen: list[Observation], found: dict[str, float]) -> float:
    return sum(one.error(found) ** 2 for one in seen)


def least_squared_error(seen: list[Observation]) -> float:
    parts = np.array([[one.parts[name] for name in "abcd"] for one in seen])
    errors = [float(len(seen))]
    for kept in (kept for size in range(1, 5) for kept in itertools.combinations(range(4), size)):
        best = np.linalg.lstsq(parts[:, kept], np.ones(len(seen)), rcond=None)[0]
        if best.min() >= 0:
            errors.append(float(((parts[:, kept] @ best - 1) ** 2).sum()))
    return min(errors)


def test_the_relative_error_counts() -> None:
    seen = [Observation("short", 1.0, {"a": 1.0}), Observation("long", 110.0, {"a": 100.0})]
    assert fit(seen)["a"] == pytest.approx(1.045, abs=0.003)


def test_what_cannot_be_told_apart_is_said() -> None:
    seen = [Observation("", 1.0, {"a": 1.0, "b": 2.0}), Observation("", 2.0, {"a": 2.0, "b": 4.0})]
    with pytest.raises(InternalError, match="2 observations don't tell a, b apart"):
        fit(seen)


def test_what_took_no_time_is_fitted_and_has_an_error() -> None:
    seen = [Observation("at once", 0.0, {"each": 1.0}), Observation("", 1.0, {"each": 1.0, "other": 1.0})]
    found = fit(seen)
    assert all(np.isfinite(one.error(found)) for one in seen)

from __future__ import annotations

import dataclasses
from random import Random

import pytest

from pdserve.bench.calibration.copies import measure_tiers
from pdserve.bench.calibration.derived import handoff_costs, noise_of, rank_costs
from pdserve.bench.calibration.plan import CalibrationPlan, group_parts, prompt_parts
from pdserve.bench.calibration.probes import steady_gaps
from pdserve.bench.listening import Heard
from pdserve.errors import InternalError
from pdserve.request import RequestId
from pdserve.scheduler.plan import RoundPlan, Row

COEFFICIENTS = {
    "prefill_tokens_16": 0.07,
    "prefill_tokens_64": 0.08,
    "prefill_tokens_128": 0.13,
    "prefill_token_context_s": 1e-6,
    "decode_rows_1": 0.022,
    "decode_rows_3": 0.026,
    "decode_rows_8": 0.036,
    "decode_context_s": 1e-6,
    "front_s": 0.012,
}
BLOCK_BYTES = 3_000_000


def test_the_parts_of_a_prompt_are_what_the_cost_model_charges_its_chunks() -> None:
    costs, length, chunk = rank_costs(COEFFICIENTS), 1000, 128
    chunks = [Row(RequestId("r"), 0, at, min(at + chunk, length), (), False) for at in range(0, length, chunk)]
    charged_s = sum(costs.round_s(RoundPlan(0, (), (row,), ())) for row in chunks)
    parts = prompt_parts(length, chunk, (16, 64, 128))
    assert sum(COEFFICIENTS[name] * amount for name, amount in parts.items()) == pytest.approx(charged_s)


def test_a_curve_is_kept_with_the_line_through_it() -> None:
    costs = rank_costs(COEFFICIENTS)
    assert costs.decode_curve == ((1, 0.022), (3, 0.026), (8, 0.036))
    assert (costs.decode_fixed_s, costs.decode_row_s) == (pytest.approx(0.02), pytest.approx(0.002))
    assert costs.prefill_curve == ((16, 0.07), (64, 0.08), (128, 0.13))
    assert 0.05 < costs.prefill_fixed_s < 0.07


@pytest.mark.parametrize(("num_prompts", "length"), [(1, 7), (2, 20), (2, 64), (1, 200)])
def test_the_parts_of_a_round_of_prompts_are_what_the_cost_model_charges_it(num_prompts: int, length: int) -> None:
    costs = dataclasses.replace(rank_costs(COEFFICIENTS), prefill_token_s=0.13 / 128)
    rows = tuple(Row(RequestId(f"r{number}"), number, 0, length, (), True) for number in range(num_prompts))
    parts = group_parts(num_prompts, length, (16, 64, 128))
    charged_s = costs.round_s(RoundPlan(0, (), rows, ()))
    assert sum(COEFFICIENTS[name] * amount for name, amount in parts.items()) == pytest.approx(charged_s)


def test_a_handoff_is_told_from_the_gap_after_the_first_token() -> None:
    """The gap is a READ, two messages and a decode round; the way to a first token is longer by two messages."""
    read_s, latency_s, bytes_per_s = 0.004, 0.002, 2e9
    heard = []
    for length in (60, 250, 500):
        decode_s = 0.02 + 0.002 + 1e-6 * (length + 1)
        gap_s = decode_s + 2 * latency_s + read_s + -(-length // 64) * BLOCK_BYTES / bytes_per_s
        heard.append(Heard(length, 0.0, (1.0, 1.0 + gap_s)))
    found = handoff_costs(heard, COEFFICIENTS, COEFFICIENTS["front_s"] - 2 * latency_s, 64, BLOCK_BYTES, 1e12)
    assert found.latency_s == pytest.approx(latency_s)
    assert found.read_s == pytest.approx(read_s)
    assert found.bytes_per_s == pytest.approx(bytes_per_s)


def test_a_handoff_faster_than_can_be_told_is_as_fast_as_a_copy() -> None:
    heard = [Heard(length, 0.0, (1.0, 1.001)) for length in (60, 250, 500)]
    found = handoff_costs(heard, COEFFICIENTS, 1.0, 64, BLOCK_BYTES, 4e9)
    assert found.latency_s == 0.0
    assert found.bytes_per_s == pytest.approx(4e9)


def test_noise_is_the_deviation_of_the_logarithm_and_ignores_strays() -> None:
    random = Random(2)
    batches = [[mean_s * random.lognormvariate(0, 0.05) for _ in range(400)] for mean_s in (0.02, 0.3)]
    strays = [[*batches[0], 5.0, 7.0], batches[1]]
    assert noise_of(batches) == pytest.approx(0.05, rel=0.1)
    assert noise_of(strays) == pytest.approx(0.05, rel=0.1)


def test_gaps_count_only_while_all_streams_decode() -> None:
    slow = Heard(0, 0.0, (1.0, 5.0, 5.2, 5.4, 5.6))
    early = Heard(1, 0.0, (0.5, 2.0, 3.0, 5.2, 5.4, 5.6, 9.0))
    gaps_s, context = steady_gaps([slow, early], prompt=100)
    assert gaps_s == pytest.approx([0.2, 0.2, 0.2])
    assert context == 100 + (3 + 4) / 2


def test_streams_that_never_meet_are_said() -> None:
    with pytest.raises(InternalError, match="2 streams never decoded side by side"):
        steady_gaps([Heard(0, 0.0, (1.0, 1.1, 1.2)), Heard(1, 0.0, (2.0, 2.1, 2.2))], prompt=10)


def test_short_prompts_are_asked_more_often_than_long_ones() -> None:
    plan = CalibrationPlan()
    assert [plan.times(length) for length in (16, 1023, 1024)] == [3, 3, 1]


def test_copies_have_rates() -> None:
    costs = measure_tiers(1 << 16)
    assert costs.host_bytes_per_s > 0
    assert costs.storage_bytes_per_s > 0
    assert costs.storage_latency_s > 0

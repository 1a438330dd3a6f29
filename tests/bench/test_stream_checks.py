from dataclasses import replace

from pdserve.bench.asking import Reply, Verdict
from pdserve.bench.stream_checks import (
    Check,
    answer_checks,
    byte_checks,
    growth_checks,
    place_checks,
    rest_checks,
)
from pdserve.bench.workload import Ask, Cancel
from pdserve.request import FinishReason, RankLoad

ASKS = [Ask(0, (1,) * 100, 8, None), Ask(1, (2,) * 130, 8, None), Ask(2, (3,) * 64, 8, Cancel(after_s=1.0))]
REPLIES = {
    0: Reply((5,), FinishReason.STOP, "remote;peer=p"),
    1: Reply((5,), FinishReason.STOP, "remote;peer=p"),
    2: Reply((), None),
}
COUNTERS = {
    "remote_prefills_total": 2,
    "decode_fallback_total": 0,
    "prompt_tokens_computed": 0,
    "prefix_hit_tokens": 64,
    "kv_descriptors_total": 4,
    "kv_bytes_total": 4000,
    "open_pulls": 0,
    "open_reads": 0,
}
DECODE = RankLoad(0, 0, 0, 0, 9, 0, 3, counters=COUNTERS)


def unmet(checks: list[Check]) -> list[str]:
    return [check.name for check in checks if not check.is_met]


def counting(**changes: int) -> RankLoad:
    return replace(DECODE, counters=COUNTERS | changes)


def test_prompts_must_be_computed_by_the_prefill_node() -> None:
    assert unmet(place_checks(ASKS, REPLIES, DECODE)) == []
    assert unmet(place_checks(ASKS, REPLIES, counting(decode_fallback_total=1))) == ["fallbacks"]
    local = REPLIES | {1: replace(REPLIES[1], placement="local;reason=no_peer")}
    assert unmet(place_checks(ASKS, local, DECODE)) == ["finished answers prefilled remotely"]
    lost = REPLIES | {1: replace(REPLIES[1], finish=None)}
    assert "finished answers" in unmet(place_checks(ASKS, lost, DECODE))


def test_every_block_crosses_once() -> None:
    """2 + 3 blocks are needed, one of them was there, and one more may have come for who gave up."""
    for moved, is_met in ((3, False), (4, True), (6, True), (7, False)):
        load = counting(kv_descriptors_total=moved, kv_bytes_total=moved * 1000)
        assert (unmet(byte_checks(ASKS, REPLIES, load, 64, 1000)) == []) is is_met
    assert unmet(byte_checks(ASKS, REPLIES, counting(kv_bytes_total=4001), 64, 1000)) == ["KV bytes moved"]


def test_everything_must_be_given_back() -> None:
    assert unmet(rest_checks(DECODE, DECODE)) == []
    assert unmet(rest_checks(DECODE, replace(DECODE, num_held_blocks=1))) == ["decode node: held blocks"]
    assert unmet(rest_checks(counting(open_reads=1), DECODE)) == ["prefill node: open reads"]


def test_one_difference_fails_and_one_tie_in_two_hundred_does_not() -> None:
    equal = dict.fromkeys(range(199), Verdict.EQUAL)
    assert unmet(answer_checks(equal | {199: Verdict.TIED})) == []
    assert len(unmet(answer_checks(equal | {199: Verdict.DIFFERENT}))) == 1
    assert len(unmet(answer_checks({0: Verdict.TIED}))) == 1


def test_growth_counts_from_the_middle_and_a_slab_that_fills_up_is_none() -> None:
    full, half_full = [100.0, 900.0, 1000.0], [100.0, 500.0, 900.0]
    assert unmet(growth_checks({"a rank": [100.0, 900.0, 910.0]}, slab_mib=800)) == []
    assert unmet(growth_checks({"a rank": full}, slab_mib=800)) == ["a rank: MiB grown in the second half"]
    assert unmet(growth_checks({"a rank": half_full}, slab_mib=800)) == []
    assert unmet(growth_checks({"a front": half_full}, slab_mib=800)) == ["a front: MiB grown in the second half"]

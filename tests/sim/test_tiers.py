"""Host copies and files in a simulated node: what they cost, and that nothing is recomputed or lost."""

from __future__ import annotations

from pdserve.sim.clock import Clock
from pdserve.sim.tiers import Line
from pdserve.sim.topology import Fused, GroupSpec
from tests.sim.worlds import BLOCK_BYTES, CHUNK_S, COSTS, DECODE_S, asked, check_all_answered, config, run

# Two answers of 8 blocks each in a pool of 12: one has to make room for the other.
SMALL = config(num_blocks=12, answer_headroom=0, num_host_blocks=16, prefix_caching=False)
TWO = [asked(n, prompt=64, output=64) for n in range(2)]


def test_an_answer_that_makes_room_goes_on_where_it_was() -> None:
    seen, totals = run(Fused(GroupSpec(1, SMALL)), TWO)
    check_all_answered(TWO, seen, totals)
    assert totals.counters["retractions"] == totals.counters["restores"] == 1
    assert totals.counters["prompt_tokens_computed"] == 2 * 64
    assert totals.counters["output_tokens"] == 2 * 64


def test_a_round_waits_for_its_copies() -> None:
    """The victim's 6 blocks leave in a round of the other, which is so much longer; they come back in another."""
    seen, totals = run(Fused(GroupSpec(1, SMALL)), TWO)
    copy_s = 6 * BLOCK_BYTES / COSTS.tiers.host_bytes_per_s
    decodes = [record.busy_s for record in seen.rounds if record.num_decode_rows]
    assert sorted({round(busy_s, 9) for busy_s in decodes}) == [DECODE_S, DECODE_S + copy_s]
    assert totals.num_tier_bytes == 2 * 6 * BLOCK_BYTES


def test_without_room_for_an_image_the_newest_answer_fails_and_the_reason_is_told() -> None:
    seen, totals = run(Fused(GroupSpec(1, config(num_blocks=12, answer_headroom=0, prefix_caching=False))), TWO)
    assert list(seen.ended) == [0]
    assert "--host-kv-gb" in seen.failed[1]
    assert totals.is_complete


# ---------------------------------------------------------------- prefixes

PROMPT = 4 * 64
ASKED = [
    asked(0, 0.0, PROMPT, output=2, hash_ids=(1, 2, 3, 4)),
    asked(1, 20.0, PROMPT, output=2),  # takes the first one's blocks
    asked(2, 40.0, PROMPT, output=2, hash_ids=(1, 2, 3, 4)),
]


def test_a_prefix_that_the_device_has_evicted_is_found_in_the_host() -> None:
    one_prompt = config(num_blocks=20, answer_headroom=0, num_host_blocks=64)
    seen, totals = run(Fused(GroupSpec(1, one_prompt)), ASKED)
    check_all_answered(ASKED, seen, totals)
    assert totals.counters["host_hit_tokens"] > 0
    assert seen.cached[2] == PROMPT - 16  # never the last token's block


def test_a_prefix_is_found_in_the_files_of_another_node() -> None:
    stored = config(num_blocks=32, num_host_blocks=32, has_storage=True)
    first, again = (asked(n, 20.0 * n, PROMPT, output=2, hash_ids=(1, 2, 3, 4)) for n in range(2))
    beside = asked(2, 20.0, PROMPT, output=2, hash_ids=(1, 2, 3, 4))
    seen, totals = run(Fused(GroupSpec(1, stored), num_nodes=2), [first, again, beside])
    check_all_answered([first, again, beside], seen, totals)
    assert seen.cached == {0: 0, 1: PROMPT - 16, 2: PROMPT - 16}
    assert totals.counters["storage_blocks_fetched"] == PROMPT // 16 - 1
    fetched_s = COSTS.tiers.storage_latency_s + 15 * BLOCK_BYTES / COSTS.tiers.storage_bytes_per_s
    loaded_s = 15 * BLOCK_BYTES / COSTS.tiers.host_bytes_per_s
    assert seen.tokens[2][0] == 20.0 + fetched_s + loaded_s + CHUNK_S / 4


def test_a_miss_is_known_after_a_glance() -> None:
    stored = config(num_host_blocks=32, has_storage=True)
    seen, _ = run(Fused(GroupSpec(1, stored)), [asked(0, prompt=64, output=1)])
    assert seen.tokens[0] == [COSTS.tiers.storage_latency_s + CHUNK_S]


def test_pieces_of_work_are_done_one_after_the_other() -> None:
    clock = Clock()
    line = Line(clock)
    assert [line.take(2.0), line.take(1.0)] == [2.0, 3.0]
    clock.now_s = 10.0
    assert line.take(1.0) == 11.0

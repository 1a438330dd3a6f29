"""A handoff between simulated nodes: who hears what when, and what becomes of it when it is not needed."""

from __future__ import annotations

import dataclasses

from pdserve.sim.topology import GroupSpec, Split
from tests.sim.worlds import BLOCK_BYTES, CHUNK_S, CONFIG, COSTS, DECODE_S, asked, check_all_answered, config, run

PAIR = Split(GroupSpec(1, CONFIG), GroupSpec(1, CONFIG))
LATENCY_S = COSTS.handoff.latency_s


def read_s(num_blocks: int) -> float:
    return COSTS.handoff.read_s + num_blocks * BLOCK_BYTES / COSTS.handoff.bytes_per_s


def test_each_message_takes_its_time_and_the_first_token_waits_for_no_kv() -> None:
    request = asked(0, prompt=128, output=3)
    seen, totals = run(PAIR, [request])
    check_all_answered([request], seen, totals)
    drawn_s = LATENCY_S + 2 * CHUNK_S
    committed_s = drawn_s + LATENCY_S + read_s(4) + 2 * LATENCY_S
    assert seen.tokens[0] == [drawn_s + LATENCY_S, committed_s + DECODE_S, committed_s + 2 * DECODE_S]
    (transfer,) = seen.transfers
    assert transfer.ended_s == committed_s
    assert transfer.exposed_s == committed_s - drawn_s
    assert transfer.started_s == LATENCY_S + CHUNK_S + LATENCY_S


def test_pulls_overlap_the_chunks_that_are_still_computed() -> None:
    seen, totals = run(PAIR, [asked(0, prompt=8 * 64, output=2)])
    (transfer,) = seen.transfers
    assert transfer.num_bytes == totals.num_handoff_bytes == 8 * 4 * BLOCK_BYTES
    assert transfer.exposed_s == 3 * LATENCY_S + read_s(4)
    assert transfer.ended_s - transfer.started_s > 7 * CHUNK_S


def test_a_prompt_of_part_of_a_block_moves_the_whole_of_it() -> None:
    seen, _ = run(PAIR, [asked(0, prompt=70, output=2)])
    assert [transfer.num_bytes for transfer in seen.transfers] == [5 * BLOCK_BYTES]


def test_the_reads_of_one_rank_come_one_after_the_other() -> None:
    """Two peers end at the same time; the second handoff's KV waits for the first's."""
    slow = dataclasses.replace(COSTS, handoff=dataclasses.replace(COSTS.handoff, bytes_per_s=BLOCK_BYTES * 4))
    seen, _ = run(
        Split(GroupSpec(1, CONFIG), GroupSpec(1, CONFIG), num_prefill_nodes=2),
        [asked(n, prompt=64, output=2) for n in range(2)],
        slow,
    )
    first, second = seen.transfers
    one_read_s = COSTS.handoff.read_s + 4 * BLOCK_BYTES / (BLOCK_BYTES * 4)
    assert second.started_s == first.started_s + one_read_s
    assert second.ended_s == first.ended_s + one_read_s


def test_what_the_decode_node_holds_already_is_not_moved_again() -> None:
    requests = [asked(n, 20.0 * n, prompt=180, output=3, hash_ids=(7, 8, 100 + n)) for n in range(2)]
    seen, totals = run(PAIR, requests)
    check_all_answered(requests, seen, totals)
    assert [transfer.num_bytes for transfer in seen.transfers] == [12 * BLOCK_BYTES, 4 * BLOCK_BYTES]
    assert seen.cached == {0: 0, 1: 128}


def test_prompts_go_to_the_peer_with_the_fewest_tokens_outstanding() -> None:
    split = Split(GroupSpec(1, CONFIG), GroupSpec(1, config(max_batch_size=16)), num_prefill_nodes=3)
    sizes = (256, 64, 64, 64, 64, 64)
    seen, _ = run(split, [asked(n, prompt=size, output=2) for n, size in enumerate(sizes)])
    tokens = dict.fromkeys(range(3), 0)
    for record in seen.rounds:
        if record.kind == "prefill":
            tokens[record.node] += record.num_prefill_tokens
    assert tokens == {0: 256, 1: 3 * 64, 2: 2 * 64}


def test_an_answer_of_one_token_needs_no_kv() -> None:
    """It ends at its first token; the transfer is abandoned, and both nodes are as if it had never been there."""
    requests = [asked(0, prompt=128, output=1), asked(1, prompt=128, output=4)]
    seen, totals = run(PAIR, requests)
    check_all_answered(requests, seen, totals)
    assert seen.ended[0] == LATENCY_S + 2 * CHUNK_S + LATENCY_S
    assert [transfer.number for transfer in seen.transfers] == [1]
    assert totals.num_handoff_bytes == 8 * BLOCK_BYTES


def test_short_prompts_are_prefilled_where_they_decode() -> None:
    split = dataclasses.replace(PAIR, min_remote_tokens=64)
    seen, totals = run(split, [asked(0, prompt=63, output=2), asked(1, 5.0, prompt=64, output=2)])
    assert [transfer.number for transfer in seen.transfers] == [1]
    assert [r.kind for r in seen.rounds if r.num_prefill_rows] == ["decode", "prefill"]
    assert totals.num_fallbacks == 0


def test_what_a_peer_refuses_is_prefilled_where_it_decodes() -> None:
    split = Split(GroupSpec(1, config(max_model_len=100)), GroupSpec(1, CONFIG))
    request = asked(0, prompt=128, output=3)
    seen, totals = run(split, [request])
    check_all_answered([request], seen, totals)
    assert {record.kind for record in seen.rounds} == {"decode"}
    assert seen.tokens[0][0] == 2 * LATENCY_S + 2 * CHUNK_S
    assert (totals.num_fallbacks, totals.counters["reroutes"]) == (1, 1)


def test_the_peer_keeps_its_blocks_until_the_last_read_is_done() -> None:
    """A pool of one prompt: the next is prefilled when the lease of the one before has ended, not when it is drawn."""
    split = Split(GroupSpec(1, config(num_blocks=4, prefix_caching=False)), GroupSpec(1, CONFIG))
    seen, _ = run(split, [asked(n, prompt=64, output=2) for n in range(2)])
    first, second = (record for record in seen.rounds if record.kind == "prefill")
    assert first.ends_s == LATENCY_S + CHUNK_S
    assert second.started_s == first.ends_s + LATENCY_S + read_s(4) + LATENCY_S


def test_a_reservation_makes_room_for_answers_that_are_under_way() -> None:
    """Two answers need all 12 blocks before a far peer accepts a third prompt: it gives its back, and comes later."""
    far = dataclasses.replace(COSTS, handoff=dataclasses.replace(COSTS.handoff, latency_s=30.0))
    tight = config(num_blocks=12, answer_headroom=0, prefix_caching=False)
    split = Split(GroupSpec(1, CONFIG), GroupSpec(1, tight), min_remote_tokens=32)
    requests = [asked(0, output=80), asked(1, output=80), asked(2, prompt=48, output=2)]
    seen, totals = run(split, requests, far)
    check_all_answered(requests, seen, totals)
    assert totals.counters["reservations_taken_back"] > 0
    assert seen.tokens[2][0] > max(seen.ended[0], seen.ended[1])

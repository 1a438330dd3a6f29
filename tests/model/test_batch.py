"""From plans to flat arrays."""

from __future__ import annotations

import numpy as np

from pdserve.model.batch import SlotTable
from pdserve.request import BlockId, RequestId, SamplingParams, TokenRequest
from pdserve.scheduler.plan import RoundPlan, Row, SlotStart


def row(slot: int, start: int, end: int, blocks: tuple[int, ...] = (), samples: bool = True) -> Row:
    return Row(RequestId(f"r{slot}"), slot, start, end, tuple(map(BlockId, blocks)), samples)


def start(table: SlotTable, slot: int, prompt: tuple[int, ...], forced: tuple[int, ...] = ()) -> None:
    request_id = RequestId(f"r{slot}")
    table.start(SlotStart(request_id, slot, forced), TokenRequest(request_id, prompt, SamplingParams(8)))


def test_rows_lie_end_to_end_with_their_slots_and_positions() -> None:
    table = SlotTable(max_slots=4, max_model_len=32, block_size=4)
    start(table, 2, tuple(range(100, 110)))
    start(table, 0, (7,), forced=(8,))
    batch = table.build(RoundPlan(0, prefill=(row(2, 0, 6, (5, 3), samples=False),), decode=(row(0, 1, 2, (9,)),)))
    assert batch.tokens.tolist() == [100, 101, 102, 103, 104, 105, 8]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 1]
    assert batch.slot_mapping.tolist() == [20, 21, 22, 23, 12, 13, 37]
    assert batch.row_starts.tolist() == [0, 6, 7]
    assert batch.context_lens.tolist() == [6, 2]
    assert batch.sampled_rows.tolist() == [1]
    assert batch.sampled_tokens.tolist() == [6]
    assert table.output_positions(batch).tolist() == [1]


def test_new_blocks_join_the_block_table_and_drawn_tokens_are_read_back() -> None:
    table = SlotTable(max_slots=2, max_model_len=16, block_size=2)
    start(table, 1, (4, 5, 6))
    batch = table.build(RoundPlan(0, prefill=(row(1, 0, 3, (7, 2)),)))
    table.append(batch, np.array([50]))
    batch = table.build(RoundPlan(1, decode=(row(1, 3, 4),)))
    assert batch.tokens.tolist() == [50]
    assert batch.slot_mapping.tolist() == [5]
    table.append(batch, np.array([51]))
    batch = table.build(RoundPlan(2, decode=(row(1, 4, 5, (1,)),)))
    assert batch.tokens.tolist() == [51]
    assert batch.slot_mapping.tolist() == [2]
    assert batch.block_tables[1, :3].tolist() == [7, 2, 1]


def test_a_start_forgets_whoever_had_the_slot() -> None:
    table = SlotTable(max_slots=1, max_model_len=8, block_size=4)
    start(table, 0, (1, 2, 3, 4, 5))
    table.build(RoundPlan(0, prefill=(row(0, 0, 5, (3, 2)),)))
    start(table, 0, (9,))
    batch = table.build(RoundPlan(1, prefill=(row(0, 0, 1, (6,)),)))
    assert batch.tokens.tolist() == [9]
    assert batch.slot_mapping.tolist() == [24]
    assert table.output_positions(batch).tolist() == [0]


def test_the_whole_context_fits_a_slot() -> None:
    table = SlotTable(max_slots=1, max_model_len=8, block_size=4)
    start(table, 0, tuple(range(8)))
    batch = table.build(RoundPlan(0, prefill=(row(0, 0, 8, (0, 1)),)))
    table.append(batch, np.array([3]))
    assert batch.context_lens.tolist() == [8]

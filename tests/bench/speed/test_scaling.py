"""Rounds by the number of their rows and their context: how they are planned, and what is told of their times."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from pdserve.bench.speed import scaling
from pdserve.bench.speed.in_process import BLOCK_SIZE, load_runner
from pdserve.bench.speed.scaling import REPEATS, Rounds, Sizes, measure_scaling
from pdserve.bench.speed.scaling_report import Scaling, scaling_table
from pdserve.bench.tiny_model import QUICK, make_model
from pdserve.kv.layout import KVLayout
from pdserve.kv.storage import KVStorage
from pdserve.model.model_config import read_config
from pdserve.model.progress import no_progress
from pdserve.model.runner import ModelRunner, RoundResult
from pdserve.request import TokenRequest
from pdserve.scheduler.plan import RoundPlan, SlotStart

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=BLOCK_SIZE)
SMALL = Sizes((1, 3), (70, 200), (0, 100), chunk=64, kv_bytes=4 << 20)


class Noting:
    """A runner that notes what it is asked, and has another one do it where there is one."""

    def __init__(self, runner: ModelRunner | None = None) -> None:
        self.plans: list[RoundPlan] = []
        self.requests: dict[int, TokenRequest] = {}
        self._runner = runner

    def start(self, start: SlotStart, request: TokenRequest) -> None:
        self.requests[start.slot] = request
        if self._runner:
            self._runner.start(start, request)

    def execute(self, plan: RoundPlan) -> RoundResult:
        self.plans.append(plan)
        return self._runner.execute(plan) if self._runner else RoundResult([0] * len(plan.sampled_rows))

    def idle(self) -> None:
        raise AssertionError("there is one rank")


def test_a_decode_round_has_a_row_a_request_at_the_end_of_its_context() -> None:
    runner = Noting()
    Rounds(runner, KVStorage(LAYOUT, 12), (5, 6, 7)).decode_ms(batch=3, context=200)
    assert len(runner.plans) == REPEATS + 1
    for plan in runner.plans:
        assert not plan.prefill
        assert [(row.slot, row.start, row.end, row.samples) for row in plan.decode] == [
            (slot, 199, 200, True) for slot in range(3)
        ]
    assert {len(request.prompt) for request in runner.requests.values()} == {200}


def test_its_blocks_are_no_other_row_s_and_in_no_order_and_come_once() -> None:
    runner = Noting()
    Rounds(runner, KVStorage(LAYOUT, 12), (5, 6, 7)).decode_ms(batch=3, context=200)
    first, *others = runner.plans
    assert [len(row.new_blocks) for row in first.decode] == [4, 4, 4]
    blocks = [block for row in first.decode for block in row.new_blocks]
    assert sorted(blocks) == list(range(12))
    assert blocks != sorted(blocks)
    assert all(row.new_blocks == () for plan in others for row in plan.decode)


def test_a_chunk_is_a_row_of_a_prompt_after_what_is_there() -> None:
    runner = Noting()
    Rounds(runner, KVStorage(LAYOUT, 12), (5, 6, 7)).chunk_ms(start=100, chunk=64)
    for plan in runner.plans:
        assert not plan.decode
        assert [(row.start, row.end, row.samples) for row in plan.prefill] == [(100, 164, False)]
    assert len(runner.plans[0].prefill[0].new_blocks) == 3


def test_sizes_end_where_the_model_s_positions_and_the_memory_do() -> None:
    sizes = Sizes().up_to(4096)
    assert sizes.contexts == (128, 1024, 4096)
    assert sizes.starts == (0, 1024)
    sizes = Sizes((1, 3), (70, 200), (0,), chunk=64, kv_bytes=8 * LAYOUT.block_bytes)
    assert [sizes.has_room(LAYOUT, 3, context) for context in sizes.contexts] == [True, False]
    assert sizes.num_blocks(LAYOUT) == 6


def test_every_block_holds_numbers_that_are_near_zero_and_differ() -> None:
    storage = KVStorage(LAYOUT, 12)
    Rounds(Noting(), storage, (5,))
    numbers = storage.slab.numpy().view(np.float32)
    assert np.isfinite(numbers).all()
    assert 0.5 < numbers.std(axis=1).min() < 2


def test_a_real_model_runs_them_and_writes_where_a_row_s_token_is(tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model", QUICK)
    storage = KVStorage(read_config(directory).kv_layout(BLOCK_SIZE), 12)
    runner = Noting(load_runner(directory, storage, "int4", 3, 1))
    rounds = Rounds(runner, storage, range(200))
    before = storage.view(3, "k").clone()
    assert rounds.decode_ms(batch=3, context=200) > 0
    changed = (storage.view(3, "k") != before).any(dim=3).any(dim=1).nonzero().tolist()  # [block, offset] of a token
    # Of the fourth block of each row, the token at 199.
    assert changed == sorted([row.new_blocks[3], 199 % BLOCK_SIZE] for row in runner.plans[0].decode)


def test_all_rounds_that_have_room_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "SIZES", SMALL)
    found = measure_scaling(make_model(tmp_path / "model", QUICK), "fp32", range(200), 1, no_progress)
    assert {batch: list(times_ms) for batch, times_ms in found.decode_ms.items()} == {1: [70, 200], 3: [70, 200]}
    blanks = [
        (batch, context)
        for batch, times_ms in found.decode_ms.items()
        for context, time_ms in times_ms.items()
        if time_ms is None
    ]
    assert blanks == [(3, 200)]
    assert list(found.chunk_ms) == [0, 100]


def test_a_further_token_costs_what_a_round_grew_by_a_row_and_token() -> None:
    found = Scaling("int4", {1: {100: 2.0, 200: 3.0}, 4: {100: 5.0, 200: None}}, {0: 10.0, 50: 20.0})
    assert found.decode_us == {1: {200: 10.0}, 4: {200: None}}
    assert found.chunk_us == {50: 200.0}
    console = Console(width=80, record=True, file=StringIO())
    console.print(scaling_table([found]))
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["int4", "1", "2.0", "3.0", "10.00"] in lines
    assert ["int4", "4", "5.0"] in lines
    assert ["int4", "a", "chunk", "10.0", "20.0", "200.00"] in lines
    assert found.figures()["chunk_us"] == {50: 200.0}

"""Doing without the kernel, and how its work is cut."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

from pdserve.kv.layout import KVLayout
from pdserve.kv.storage import KVStorage
from pdserve.model.attention import build_attention
from pdserve.model.attention.native_cpu import NativeAttention, plan_items
from pdserve.model.attention.torch_cpu import TorchAttention
from pdserve.model.batch import Batch
from pdserve.model.native_build import NativeUnavailable


def storage_of(layout: KVLayout | None = None) -> KVStorage:
    return KVStorage(layout or KVLayout(1, 1, 16, 16), 1)


@pytest.mark.parametrize(
    ("compiler", "reason"), [("no-such-compiler", "not found"), ("false", "ended with 1")], ids=["absent", "failing"]
)
def test_without_a_working_compiler_torch_attends_and_one_line_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, compiler: str, reason: str
) -> None:
    with caplog.at_level(logging.WARNING):
        attention = build_attention(storage_of(), 2, tmp_path, compiler)
    assert isinstance(attention, TorchAttention)
    assert len(caplog.records) == 1
    assert reason in caplog.text
    assert not list((tmp_path / "native").iterdir())


def test_one_openmp_runtime_lives_in_the_process(kernel_cache: Path) -> None:
    NativeAttention(storage_of(), 2, kernel_cache / "native")
    names = {Path(path).name for path in Path("/proc/self/maps").read_text().split() if "gomp" in path}
    assert len(names) == 1


@pytest.mark.parametrize(
    "layout", [KVLayout(1, 1, 16, 16, "float16"), KVLayout(1, 1, 512, 16)], ids=["dtype", "head_dim"]
)
def test_shapes_the_kernel_lacks_are_refused(layout: KVLayout, kernel_cache: Path) -> None:
    with pytest.raises(NativeUnavailable, match="head_dim up to 256"):
        NativeAttention(storage_of(layout), 2, kernel_cache)


def batch_of_rows(rows: list[tuple[int, int]]) -> Batch:
    ends, lengths = np.array([end for _, end in rows]), np.array([end - start for start, end in rows])
    nothing = np.zeros(0, np.int64)
    return Batch(
        tokens=nothing,
        positions=nothing,
        slot_mapping=nothing,
        row_starts=np.concatenate(([0], np.cumsum(lengths))),
        context_lens=ends,
        slots=np.arange(len(rows)),
        sampled_rows=nothing,
        block_tables=np.zeros((0, 0), np.int32),
    )


def test_items_cover_every_query_and_every_visible_key_once() -> None:
    rng = np.random.default_rng(0)
    for group in (1, 3, 8, 64):
        rows = [(int(start), int(start + rng.integers(1, 200))) for start in rng.integers(0, 3000, 20)]
        batch = batch_of_rows(rows)
        items, merges, num_partials = plan_items(batch, group)
        covered = np.zeros((batch.row_starts[-1], 3300), np.int64)
        lines: list[int] = []
        for first, count, position, key_begin, key_end, slot, partial in items.tolist():
            assert 1 <= count * group <= max(64, group)
            row = np.searchsorted(batch.row_starts, first, side="right") - 1
            assert slot == batch.slots[row]
            assert position == rows[row][0] + first - batch.row_starts[row]
            covered[first : first + count, key_begin:key_end] += 1
            if partial >= 0:
                lines += range(partial, partial + count * group)
        for row, (start, end) in enumerate(rows):
            for token in range(end - start):
                visible = covered[batch.row_starts[row] + token]
                assert (visible[: start + token + 1] == 1).all()
                assert not visible[end:].any()
        assert sorted(lines) == list(range(num_partials))
        assert sum(count * group * parts for _, count, _, parts in merges.tolist()) == num_partials

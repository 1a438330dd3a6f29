"""The KV pull benchmark measures real pulls between processes and reports every case once."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from pdserve.bench.kv_pull import LAYOUTS, PullRow, measure_kv_pull, print_rows
from pdserve.errors import TransferFailed


def test_every_layout_and_count_is_measured_once_with_its_exact_bytes() -> None:
    rows = measure_kv_pull(transports=("tcp,self",), block_counts=(1, 2), slab_blocks=4)
    assert [(row.layout, row.num_blocks, row.num_bytes) for row in rows] == [
        (name, count, count * layout.block_bytes) for name, layout in LAYOUTS.items() for count in (1, 2)
    ]
    assert all(row.read_gb_per_s > 0 and row.copy_gb_per_s > 0 for row in rows)


def test_a_transport_that_does_not_exist_fails_with_what_was_said_of_it() -> None:
    with pytest.raises(TransferFailed, match="the pull over nonsense failed with 1"):
        measure_kv_pull(transports=("nonsense",), block_counts=(1,), slab_blocks=2)


def test_rows_are_printed_with_their_share_of_the_copy() -> None:
    out = io.StringIO()
    print_rows([PullRow("tiny", "default", 8, 4_000_000, 3.0, 6.0)], Console(file=out, width=100))
    assert "50%" in out.getvalue()
    assert "4.0" in out.getvalue()

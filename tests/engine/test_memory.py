"""How many blocks a rank takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.engine import memory
from pdserve.engine.memory import available_bytes, choose_num_blocks
from pdserve.errors import StartupError
from pdserve.kv.layout import KVLayout

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=64)  # 1 KiB a block


def choose(available: int, *, wanted: int | None = None, fraction: float = 0.5) -> int:
    return choose_num_blocks(
        LAYOUT, wanted=wanted, fraction=fraction, max_model_len=640, max_num_seqs=4, available=available
    )


def test_a_fraction_of_what_is_available_is_taken() -> None:
    assert choose(40 * 1024) == 20


def test_no_more_is_taken_than_every_slots_longest_request_needs() -> None:
    assert choose(2**40) == 4 * 11


def test_a_wanted_number_is_taken_whatever_the_fraction() -> None:
    assert choose(100 * 1024, wanted=100) == 100


def test_a_wanted_number_that_does_not_fit_is_refused_with_one_that_would() -> None:
    with pytest.raises(StartupError, match=r"--num-kv-blocks 101 needs .* available: 50 blocks would fit"):
        choose(100 * 1024, wanted=101)


def test_memory_for_less_than_a_block_is_refused_with_the_flag() -> None:
    with pytest.raises(StartupError, match="raise --kv-memory-fraction"):
        choose(1024, fraction=0.9)


@pytest.mark.parametrize(("limit", "wanted"), [(None, 8192), ("max", 8192), ("6000", 5000), ("99999999", 8192)])
def test_available_is_what_the_kernel_and_the_control_group_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, wanted: int
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 16 kB\nMemAvailable:   8 kB\nHugePages_Total: 0\n")
    (tmp_path / "memory.current").write_text("1000\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
    monkeypatch.setattr(memory, "_CGROUP_LIMIT", tmp_path / "memory.max")
    monkeypatch.setattr(memory, "_CGROUP_USED", tmp_path / "memory.current")
    assert available_bytes(tmp_path / "meminfo") == wanted

"""A handoff's time is split by its messages, whatever came before it in the log."""

from __future__ import annotations

import pytest

from pdserve.bench.handoff_times import split_of
from pdserve.bench.handoff_witness import Passed


def handoff(name: str, begin_s: float) -> list[Passed]:
    """Start, and then something each second; two chunks of three are announced before the last."""
    kinds = ["start", "accepted", "chunk_ready", "chunk_ready", "chunk_ready", "first_token", "release", "released"]
    return [Passed(name, kind, begin_s + at, 100 if kind == "chunk_ready" else 0) for at, kind in enumerate(kinds)]


def test_every_part_lies_between_its_messages() -> None:
    log = [*handoff("before", 0.0), *handoff("mine", 100.0), Passed("before", "end", 101.5)]
    split = split_of(log, started_s=99.5, piece_times_s=[105.1, 107.25, 108.0], all_reads_s=8.0)
    assert split.parts_ms() == pytest.approx([500, 1000, 3000, 1000, 2000, 1000, 250, 8000])
    assert split.hidden_share == pytest.approx(3 / 4)
    assert len(split.names()) == len(split.parts_ms())


def test_what_is_read_when_nothing_is_computed_any_more_is_not_hidden() -> None:
    split = split_of(handoff("mine", 0.0), started_s=0.0, piece_times_s=[7.5], all_reads_s=1.5)
    assert split.hidden_share == 0.0

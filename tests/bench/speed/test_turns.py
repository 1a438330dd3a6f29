"""Engines in turns, and the tables that come of it: on engines of this test, whose speeds are known."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pdserve.bench.peers.http_server import ServerFailed
from pdserve.bench.speed.cells import Cell
from pdserve.bench.speed.engines import Engine, EngineFailed
from pdserve.bench.speed.machine import Machine
from pdserve.bench.speed.markdown import BEGIN, END, write_markdown
from pdserve.bench.speed.report import best_peer, failures, ratios, show, tables
from pdserve.bench.speed.turns import Row, take_turns
from pdserve.errors import NotReady
from pdserve.model.progress import no_progress

CELLS = [Cell("prefill", 1, 8, 1), Cell("decode", 2, 8, 4)]
MACHINE = Machine("a CPU", 2, ("avx2",), 24.0)


class Known:
    """speeds: by cell; an error is raised."""

    def __init__(self, turns: list[str], name: str, speeds: dict[str, float | Exception]) -> None:
        self.turns, self.name, self.speeds = turns, name, speeds

    def speed(self, cell: Cell, text: Sequence[int], repeat: int) -> float:
        self.turns.append(f"{self.name} {cell.name} {repeat}")
        found = self.speeds[cell.name]
        if isinstance(found, Exception):
            raise found
        return found + repeat

    @contextlib.contextmanager
    def start(self) -> Iterator[Known]:
        self.turns.append(f"{self.name} starts")
        yield self
        self.turns.append(f"{self.name} ends")


def engine(turns: list[str], name: str, *speeds: float | Exception, **more: bool) -> Engine:
    known = Known(turns, name, dict(zip(("prefill", "decode"), speeds, strict=True)))
    return Engine(name, "fp32", "1.0", known.start, **more)


def rows_of(*engines: Engine, repeats: int = 3) -> list[Row]:
    return take_turns(engines, CELLS, (1, 2, 3), repeats, no_progress)


@pytest.fixture
def rows() -> list[Row]:
    turns: list[str] = []
    return rows_of(
        engine(turns, "fused", 200.0, 30.0, is_over_grpc=True),
        engine(turns, "engine", 900.0, 900.0),
        engine(turns, "slow", 99.0, 14.0, is_peer=True),
        engine(turns, "odd", 49.0, EngineFailed("no room"), is_peer=True, is_called_anew=True),
    )


def test_each_repeat_starts_every_engine_once_measures_all_cells_and_ends_it() -> None:
    turns: list[str] = []
    rows_of(engine(turns, "a", 1.0, 2.0), engine(turns, "b", 1.0, 2.0), repeats=2)
    assert turns == [
        line.format(name=name, repeat=repeat)
        for repeat in range(2)
        for name in "ab"
        for line in ("{name} starts", "{name} prefill {repeat}", "{name} decode {repeat}", "{name} ends")
    ]


def test_the_median_counts_beside_least_and_most(rows: list[Row]) -> None:
    (_, medians), (_, spreads), _ = tables(rows)
    assert medians[1][:3] == ["fused fp32", "201.0", "31.0"]
    assert spreads[1] == ["fused fp32", "200.0–202.0", "30.0–32.0"]


@pytest.mark.parametrize("error", [EngineFailed("no room"), ServerFailed("no room"), NotReady("no room")])
def test_a_cell_that_fails_is_told_and_the_run_goes_on(error: Exception) -> None:
    turns: list[str] = []
    rows = rows_of(engine(turns, "a", error, 2.0), engine(turns, "b", 1.0, ExceptionGroup("several", [error])))
    assert rows[0].reasons == {"prefill": "no room"}
    assert rows[0].median("decode") == 3.0
    assert failures(rows) == ["a fp32, prefill: failed: no room", "b fp32, decode: failed: no room"]
    assert turns.count("b ends") == 3


def test_an_engine_that_does_not_start_fails_in_every_cell() -> None:
    @contextlib.contextmanager
    def start() -> Iterator[Known]:
        raise EngineFailed("no  such\nmodel")
        yield

    rows = rows_of(Engine("a", "fp32", "1.0", start), engine([], "b", 1.0, 2.0))
    assert rows[0].reasons == {"prefill": "no such model", "decode": "no such model"}
    assert rows[1].median("decode") == 3.0


def test_what_it_needs_is_made_before_its_start() -> None:
    turns: list[str] = []
    known = engine(turns, "a", 1.0, 2.0)
    rows_of(replace(known, prepare=lambda: turns.append("made")), repeats=1)
    assert turns[:2] == ["made", "a starts"]

    def fail() -> None:
        raise EngineFailed("no converter")

    (row,) = rows_of(replace(known, prepare=fail))
    assert set(row.reasons.values()) == {"no converter"}


def test_a_cell_that_failed_in_one_repeat_has_no_median() -> None:
    row = Row("a", "fp32", "1.0", True, False, {"prefill": [3.0, 4.0]}, {"prefill": "no room"})
    assert row.median("prefill") is None


def test_what_is_over_grpc_is_compared_with_the_best_peer_of_each_cell(rows: list[Row]) -> None:
    assert best_peer(rows, "prefill") == ("slow fp32", 100.0)
    assert best_peer(rows, "decode") == ("slow fp32", 15.0)
    assert ratios(rows) == {"fused fp32": {"prefill": 2.01, "decode": 31.0 / 15.0}}
    assert tables(rows)[2][1][1:] == [["fused fp32", "2.01", "2.07"], ["best peer", "slow fp32", "slow fp32"]]


def test_without_a_peer_there_is_nothing_to_compare(rows: list[Row]) -> None:
    assert ratios(rows[:2]) == {}
    assert len(tables(rows[:2])) == 2


def test_a_tool_that_is_called_for_each_cell_has_no_start(rows: list[Row]) -> None:
    assert [len(row.started_s) for row in rows] == [3, 3, 3, 0]


def test_the_tables_are_shown_with_the_reasons(rows: list[Row]) -> None:
    console = Console(record=True, width=120)
    show(rows, console)
    shown = console.export_text()
    assert "201.0" in shown
    assert "odd fp32, decode: failed: no room" in shown


def test_markdown_replaces_what_was_between_its_marks_and_nothing_else(rows: list[Row], tmp_path: Path) -> None:
    file = tmp_path / "benchmarks.md"
    file.write_text(f"# Speed\n\n{BEGIN}\nof before\n{END}\n\nMore.\n")
    for _ in range(2):
        write_markdown(file, rows, "pdserve bench speed --repeats 3", MACHINE)
    text = file.read_text()
    assert text.startswith(
        f"# Speed\n\n{BEGIN}\nMeasured by `pdserve bench speed --repeats 3`, 3 repeats in turns, on a CPU"
    )
    assert text.endswith(f"{END}\n\nMore.\n")
    assert "of before" not in text
    assert text.count("| fused fp32 | 201.0 | 31.0 |") == 1
    assert "Versions: pdserve 1.0, slow 1.0, odd 1.0." in text
    assert "- odd fp32, decode: failed: no room" in text


def test_markdown_without_marks_is_added_at_the_end(rows: list[Row], tmp_path: Path) -> None:
    file = tmp_path / "benchmarks.md"
    file.write_text("# Speed\n")
    write_markdown(file, rows, "c", MACHINE)
    assert file.read_text().startswith(f"# Speed\n\n{BEGIN}\n")
    assert file.read_text().endswith(f"{END}\n")

"""`pdserve trace`: rounds of nodes for people, for programs and for Perfetto."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pdserve import cli
from pdserve.commands.perfetto import trace_of
from pdserve.commands.rounds import HEADING, LEGEND, Noted, line_of
from pdserve.rounds import NUM_KEPT, GateDecision, RankRounds, Round
from pdserve.rpc.fake import EchoGenerator, FakeRounds, fake_node

NOBODY = "127.0.0.1:1"
BARE = Round(1, 5_000_000, 40, 90, 0, 0, 0)
GATED = Round(
    7, 5_001_000, 100, 35_600, 2, 512, 8, 107, 200, 310, 35_100, vote=True, decision=GateDecision.BURST, is_held=False,
    num_largest_tokens=640, num_transfers=1,
)  # fmt: skip


class GrowingRounds(FakeRounds):
    """The last rank has one more as soon as somebody who has seen its rounds asks for newer ones."""

    async def rounds(self, number: int, *, after: int | None, most: int) -> RankRounds:
        if number == len(self) - 1 and after == 1:
            self.add(number, BARE._replace(number=2))
        return await super().rounds(number, after=after, most=most)


@pytest.fixture
def source() -> FakeRounds:
    rounds = GrowingRounds(num_ranks=2)
    rounds.add(0, BARE, GATED._replace(number=2))
    rounds.add(1, BARE._replace(start_us=4_999_000))
    return rounds


@pytest.fixture
def target(source: FakeRounds) -> Iterator[str]:
    """The address of a node that remembers rounds, served by a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    node = fake_node(EchoGenerator(), rounds=source)
    try:
        yield asyncio.run_coroutine_threadsafe(node.__aenter__(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(node.__aexit__(None, None, None), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_the_last_rounds_of_all_ranks_are_one_line_each_in_the_order_of_time(
    target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["trace", target]) == 0
    heading, *lines = capsys.readouterr().out.removesuffix(LEGEND + "\n").splitlines()
    assert heading == HEADING
    assert [line.split()[1:3] for line in lines] == [["1", "1"], ["0", "1"], ["0", "107"]]


def test_last_is_of_each_rank(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", target, "--last", "1"]) == 0
    lines = capsys.readouterr().out.removesuffix(LEGEND + "\n").splitlines()[1:]
    assert [line.split()[1:3] for line in lines] == [["1", "1"], ["0", "107"]]


def test_several_nodes_have_letters(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", target, target, "--last", "1"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"A: {target}\nB: {target}\n{HEADING}\n")
    assert {line.split()[1] for line in shown.splitlines()[3:7]} == {"A0", "A1", "B0", "B1"}


def test_lines_fit_80_columns_and_say_what_there_was() -> None:
    longest = GATED._replace(
        group_number=1_234_567, gather_us=999_999, forward_us=59_999_900, total_us=59_999_900, num_prefill_rows=32,
        num_prefill_tokens=8192, num_decode_rows=1024, decision=GateDecision.UNWANTED, is_held=True,
    )  # fmt: skip
    lines = [line_of(Noted(25, 99, 0, one), 26) for one in (BARE, GATED, longest)]
    assert max(map(len, [*lines, HEADING, *LEGEND.splitlines()])) <= 80
    assert lines[0].split()[1:] == ["Z99", "1", "–", "–", "0.1", "–", "–"]
    assert lines[1].split()[1:] == ["Z99", "107", "0.2", "35.1", "35.6", "2/512", "8", "yes", "burst"]
    assert lines[2].endswith("-unwanted*")
    assert lines[0].split()[0] == "00:05.000"


def test_json_is_one_round_a_line_and_absent_is_null(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", target, "--json", "-"]) == 0
    other, bare, gated = map(json.loads, capsys.readouterr().out.splitlines())
    assert (other["rank"], bare["rank"], bare["gather_us"], bare["is_open"]) == (1, 0, None, None)
    assert (gated["node"], gated["start_unix_us"], gated["decision"], gated["is_open"]) == (
        target,
        6_001_000,
        "burst",
        True,
    )


def test_following_shows_rounds_for_that_many_seconds_and_only_new_ones(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rounds.jsonl"
    assert cli.main(["trace", target, "--seconds", "3", "--json", str(file)]) == 0
    assert [(one["rank"], one["number"]) for one in map(json.loads, file.read_text().splitlines())] == [(1, 2)]
    assert len(capsys.readouterr().out.removesuffix(LEGEND + "\n").splitlines()) == 2


def test_a_trace_for_perfetto_is_written_in_place_of_lines(
    target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.json"
    assert cli.main(["trace", target, "--perfetto", str(file)]) == 0
    shown = capsys.readouterr()
    assert (shown.out, "3 rounds" in shown.err) == ("", True)
    check_format(json.loads(file.read_text()))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([NOBODY, "--timeout-s", "5"], f"pdserve trace: no node answers at {NOBODY}"),
        (["here"], "NODE here: must be HOST:PORT"),
        (["--last", "0"], "--last 0: asks for nothing"),
        (["--last", str(NUM_KEPT + 1), "--seconds", "0"], "--seconds 0: must be more than 0"),
        (["--perfetto", "/no/such/place/x.json"], "--perfetto /no/such/place/x.json: there is no directory"),
    ],
)
def test_what_is_wrong_is_told_in_a_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trace", *words]) > 0
    assert said in capsys.readouterr().err


# ---------------------------------------------------------------- the Trace Event Format

# What each kind of event must have besides, by "Trace Event Format" (the document that ui.perfetto.dev refers to).
NEEDED = {"X": {"ts", "dur", "cat"}, "i": {"ts", "s", "cat"}, "M": {"args"}}


def check_format(trace: dict[str, Any]) -> None:
    """Every event as documented, every track named, slices of a track apart or one in the other."""
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    events = trace["traceEvents"]
    named = {(one["pid"], one["tid"]) for one in events if one["name"] == "thread_name"}
    for one in events:
        assert {"name", "ph", "pid", "tid"} | NEEDED[one["ph"]] <= set(one)
        assert all(isinstance(one[name], int) and one[name] >= 0 for name in ("pid", "tid", "ts", "dur") if name in one)
        assert one["ph"] != "i" or one["s"] in ("g", "p", "t")
        assert one["ph"] == "M" or (one["pid"], one["tid"]) in named
    for track in named:
        check_nesting([one for one in events if one["ph"] == "X" and (one["pid"], one["tid"]) == track])


def check_nesting(slices: list[dict[str, Any]]) -> None:
    open_ends: list[int] = []
    for one in sorted(slices, key=lambda one: (one["ts"], -one["dur"])):
        while open_ends and open_ends[-1] <= one["ts"]:
            open_ends.pop()
        assert not open_ends or one["ts"] + one["dur"] <= open_ends[-1], one
        open_ends.append(one["ts"] + one["dur"])


def gate_round(number: int, decision: GateDecision, group_number: int | None = None) -> Round:
    return GATED._replace(number=number, start_us=40_000 * number, decision=decision, group_number=group_number)


def test_a_track_a_rank_a_slice_a_round_and_an_instant_where_the_gate_opens() -> None:
    said = [GateDecision.BETWEEN, GateDecision.ALL, GateDecision.BURST, GateDecision.BETWEEN, GateDecision.ANY]
    rounds = [
        Noted(node, rank, 1_700_000_000_000_000, gate_round(number, decision))
        for node, rank in ((1, 0), (0, 1), (0, 0))
        for number, decision in enumerate(said, 1)
    ]
    trace = trace_of(rounds, ["a:1", "b:2"])
    check_format(trace)
    events = trace["traceEvents"]
    tracks = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert tracks == {(1, 1): "rank 0", (1, 2): "rank 1", (2, 1): "rank 0"}
    whole = [one for one in events if one["name"] == "prefill 512 + decode 8"]
    assert len(whole) == len(rounds)
    assert (whole[0]["ts"], whole[0]["dur"]) == (1_700_000_000_040_000, 35_600)
    assert whole[0]["args"]["decision"] == "closed: between"
    openings = [(one["name"], one["ts"] - 1_700_000_000_000_000) for one in events if one["ph"] == "i"]
    assert openings == [("gate opens: all", 80_000), ("gate opens: any", 200_000)] * 3


def test_across_a_gap_no_opening_is_claimed() -> None:
    rounds = [Noted(0, 0, 0, gate_round(1, GateDecision.BETWEEN)), Noted(0, 0, 0, gate_round(3, GateDecision.ALL))]
    assert not [one for one in trace_of(rounds, ["a:1"])["traceEvents"] if one["ph"] == "i"]


def test_what_a_round_has_no_value_for_is_no_argument() -> None:
    trace = trace_of([Noted(0, 0, 0, BARE)], ["a:1"])
    check_format(trace)
    slices = [one for one in trace["traceEvents"] if one["ph"] == "X"]
    assert [one["name"] for one in slices] == ["idle", "plan"]
    assert not {"vote", "decision", "gather_us", "num_transfers"} & set(slices[0]["args"])

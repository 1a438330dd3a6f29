"""`pdserve status`: health and loads of nodes, for people, programs and shells."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

import pytest
from rich.console import Console

from pdserve import cli
from pdserve.commands import status
from pdserve.commands.look import Look, look_at
from pdserve.errors import InternalError, NotReady
from pdserve.request import RankLoad
from pdserve.rpc.fake import EchoGenerator

NOBODY = "127.0.0.1:1"


def ranks(num: int) -> tuple[RankLoad, ...]:
    counters = {"num_peers": 2, "num_ready_peers": 1, "output_tokens": 1234567}
    return tuple(
        RankLoad(rank, 32, 1000, 0, 100_000, 99_999, 0, num_live_leases=12, num_open_transfers=3, counters=counters)
        for rank in range(num)
    )


def test_a_node_that_serves_is_shown_and_is_status_0(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--target", target]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in (target, "SERVING", "fake", "3/64"))
    assert "rounds" not in shown


def test_counters_are_shown_where_they_are_asked_for(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--target", target, "--counters"]) == 0
    assert "rounds" in capsys.readouterr().out


def test_status_is_0_only_where_all_serve(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--target", f"{target},{NOBODY}", "--timeout-s", "5"]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "UNREACHABLE" in shown
    assert f"{NOBODY}: no node answers at {NOBODY}" in shown


def test_the_same_is_told_as_json(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--target", target, "--target", NOBODY, "--json", "-"]) == 1
    first, second = json.loads(capsys.readouterr().out)
    assert (first["target"], first["health"], first["model"], first["is_well"]) == (target, "SERVING", "fake", True)
    assert (first["ranks"][0]["num_held_blocks"], first["ranks"][0]["counters"]) == (3, {"rounds": 0})
    assert (second["health"], second["is_well"], second["ranks"]) == ("UNREACHABLE", False, [])


@pytest.mark.parametrize(
    ("error", "check", "is_well"),
    [(NotReady("the rank is busy"), False, True), (InternalError("the tables disagree"), True, False)],
)
def test_what_a_node_does_not_say_is_told_with_its_reason(
    error: Exception, check: bool, is_well: bool, target: str, generator: EchoGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def loads(*, check_integrity: bool = False) -> Sequence[RankLoad]:
        raise error

    monkeypatch.setattr(generator, "loads", loads)
    (look,) = look_at([target], 5.0, check_integrity=check)
    assert (look.health, look.reasons, look.is_well) == ("SERVING", (str(error),), is_well)
    assert look.model == "fake"


def test_several_ranks_of_several_nodes_fit_80_columns() -> None:
    looks = [
        Look("10.123.123.1:50051", "SERVING", "decode", "3bdad3e0" * 4, "0.1.0", "smollm2", 98765.0, ranks(2)),
        Look("10.123.123.2:50052", "NOT_SERVING", "prefill", "3bdad3e0" * 4, "0.1.0", "smollm2", 98765.0, ranks(8)),
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    status.show(looks, console, with_counters=True)
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if "99,999/100,000" in line]
    assert [row[-7:] for row in rows] == [
        [str(rank), "32", "1000", "99,999/100,000", "12", "3", "1/2"] for rank in (*range(2), *range(8))
    ]
    assert [row[0] for row in (rows[0], rows[2])] == ["10.123.123.1:50051", "10.123.123.2:50052"]
    assert any(line.split() == ["output_tokens", "9,876,536", "1,234,567", "1,234,567"] for line in lines)


def test_watching_goes_on_until_ctrl_c(
    target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        status.watch(lambda: look_at([target], 5.0), 0.5, with_counters=False, pause=pause)
    assert pauses == [0.5] * 3
    assert capsys.readouterr().out.count(target) == 6


def test_watching_writes_no_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["status", "--watch", "1", "--json", "-"]) == 2
    assert "--json -: takes the figures of one look" in capsys.readouterr().err

"""The timeline keeps what it says it keeps, and shows it: as a picture and as a page that needs nothing else."""

from __future__ import annotations

import itertools
import json
import re
import struct
from pathlib import Path

import pytest

from pdserve.errors import StartupError
from pdserve.sim.drawing import timeline_html, timeline_png
from pdserve.sim.observer import SimRound, Transferred
from pdserve.sim.simulation import Simulation
from pdserve.sim.timeline import Activity, Timeline, activity
from pdserve.sim.topology import Fused, GroupSpec, Split
from tests.sim.worlds import CONFIG, COSTS, Listed, asked

DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)


def a_round(
    start_s: float, rank: int = 0, prefill: int = 0, decode: int = 0, held: bool = False, kind: str = "fused"
) -> SimRound:
    return SimRound(kind, 0, rank, start_s, start_s + 0.5, 0.25, prefill, 64 * prefill, decode, held, held, 7)


def timeline_of(*rounds: SimRound, transfers: tuple[Transferred, ...] = (), most: int = 100) -> Timeline:
    timeline = Timeline(max_rounds=most, title="a <b>title</b> & </script> more")
    for record in rounds:
        timeline.on_round(record)
    for transfer in transfers:
        timeline.on_transfer(transfer)
    return timeline


def page_data(timeline: Timeline) -> dict[str, object]:
    found = DATA.search(timeline_html.page(timeline))
    assert found is not None
    return json.loads(found[1])


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (a_round(0, prefill=1), Activity.PREFILL),
        (a_round(0, decode=3), Activity.DECODE),
        (a_round(0, prefill=1, decode=3), Activity.BOTH),
        (a_round(0, decode=3, held=True), Activity.HELD),
        (a_round(0, held=True), Activity.HELD),
    ],
)
def test_a_round_is_one_activity(record: SimRound, expected: Activity) -> None:
    assert activity(record) is expected


def test_what_is_left_out_is_counted_and_told() -> None:
    timeline = timeline_of(*(a_round(n) for n in range(5)), transfers=(Transferred(1, 0, 1, 64, 0),), most=3)
    assert [record.started_s for record in timeline.rounds] == [0, 1, 2]
    assert (timeline.num_rounds_left_out, timeline.num_transfers_left_out) == (2, 1)
    assert "2 later rounds and 1 later transfers are left out" in timeline.note
    assert timeline_of(a_round(0)).note == ""


def test_rows_are_ranks_prefill_before_decode_and_idle_ones_too() -> None:
    topology = Split(GroupSpec(2, CONFIG), GroupSpec(1, CONFIG), num_prefill_nodes=1, num_decode_nodes=2)
    timeline = Timeline(topology=topology)
    timeline.on_round(a_round(0, kind="decode", decode=1))
    assert [key.label for key in timeline.rows()] == ["prefill 0.0", "prefill 0.1", "decode 0.0", "decode 1.0"]
    assert [len(rounds) for rounds in timeline.rows().values()] == [0, 0, 1, 0]


def test_transfers_of_a_line_never_overlap_and_lines_are_few() -> None:
    spans = ((0, 3), (1, 2), (2, 5), (3, 4), (4, 6))
    lanes = timeline_of(transfers=tuple(Transferred(n, *span, 64, 0) for n, span in enumerate(spans))).lanes()
    assert sorted(one.number for lane in lanes for one in lane) == [0, 1, 2, 3, 4]
    assert all(before.ended_s <= after.started_s for lane in lanes for before, after in itertools.pairwise(lane))
    assert len(lanes) == 2


def test_the_page_holds_every_round_and_transfer() -> None:
    rounds = [a_round(n, rank, prefill=n % 2, decode=rank) for n in range(20) for rank in range(3)]
    data = page_data(timeline_of(*rounds, transfers=(Transferred(9, 1.0, 1.5, 4096, 0.125),)))
    assert [row["label"] for row in data["rows"]] == ["fused 0.0", "fused 0.1", "fused 0.2"]
    for rank, row in enumerate(data["rows"]):
        own = [record for record in rounds if record.rank == rank]
        assert row["start_us"] == [round(record.started_s * 1e6) for record in own]
        assert row["prefill_tokens"] == [record.num_prefill_tokens for record in own]
        assert row["decode_rows"] == [record.num_decode_rows for record in own]
        assert {len(column) for name, column in row.items() if name != "label"} == {20}
    (lane,) = data["lanes"]
    assert lane == {
        "number": [9],
        "start_us": [1_000_000],
        "length_us": [500_000],
        "exposed_us": [125_000],
        "num_bytes": [4096],
    }


def test_the_page_needs_nothing_from_anywhere() -> None:
    page = timeline_html.page(timeline_of(a_round(0, decode=1)))
    assert "http://" not in page
    assert "https://" not in page
    assert not re.search(r"\b(src|href|import|@import|url)\s*[=(]", page)
    assert "default-src 'none'" in page


def test_a_title_is_text_wherever_it_stands() -> None:
    page = timeline_html.page(timeline_of(a_round(0)))
    assert "<b>title" not in page.split('id="data"')[0]
    assert page.count("</script>") == 2
    assert page_data(timeline_of(a_round(0)))["title"] == "a <b>title</b> & </script> more"


def test_the_picture_is_an_image_that_grows_with_the_ranks(tmp_path: Path) -> None:
    def height_of(num_ranks: int) -> int:
        path = tmp_path / f"{num_ranks}.png"
        rounds = (a_round(n, rank, decode=1) for n in range(10) for rank in range(num_ranks))
        timeline_of(*rounds, transfers=(Transferred(1, 0, 1, 64, 0.5),), most=10_000).write_png(path)
        content = path.read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", content[16:24])
        assert 1_000 <= width <= 2_000
        return int(height)

    assert 100 < height_of(1) < height_of(64) < 4_100


def test_the_picture_of_nothing_can_be_drawn(tmp_path: Path) -> None:
    timeline = Timeline(topology=Fused(GroupSpec(2, CONFIG)))
    timeline.write_png(tmp_path / "empty.png")
    timeline.write_html(tmp_path / "empty.html")
    assert (tmp_path / "empty.png").stat().st_size > 1_000
    assert timeline_png.MAX_LABELS > 2


def test_the_same_rounds_are_the_same_file(tmp_path: Path) -> None:
    for name in ("one", "two"):
        timeline_of(a_round(0, decode=1), a_round(1, prefill=1)).write_png(tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


@pytest.mark.parametrize("write", [Timeline.write_png, Timeline.write_html])
def test_a_file_that_cannot_be_written_is_named(write, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"no/where.*check the path"):
        write(timeline_of(a_round(0)), tmp_path / "no" / "where")


def test_a_simulation_s_rounds_come_through() -> None:
    topology = Fused(GroupSpec(2, CONFIG))
    timeline = Timeline(topology=topology)
    Simulation(topology, COSTS, Listed([asked(0), asked(1)]), timeline).run()
    assert all(rounds for rounds in timeline.rows().values())
    assert {activity(record) for record in timeline.rounds} == {Activity.PREFILL, Activity.DECODE}

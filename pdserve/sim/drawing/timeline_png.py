"""The timeline as one picture: a line a rank, time to the right."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pdserve.sim.drawing.canvas import BLUE, GREEN, GREY, PURPLE, RED, YELLOW, figure, save
from pdserve.sim.observer import SimRound, Transferred
from pdserve.sim.timeline import Activity, RowKey, Timeline, activity

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {Activity.PREFILL: RED, Activity.DECODE: BLUE, Activity.BOTH: PURPLE, Activity.HELD: YELLOW}
WAITS, TRANSFER, EXPOSED = "waits for its group", "transfer", "transfer that a token waits for"

WIDTH_IN, MARGIN_IN = 14.0, 1.6
MAX_HEIGHT_IN = 40.0
MAX_LABELS = 70  # more of them would be written over each other
MAX_LANES = 24


class Bar(NamedTuple):
    """A span of time on a line of the picture. height: share of the line."""

    line: int
    start_s: float
    length_s: float
    height: float


def write(timeline: Timeline, path: str | Path) -> None:
    """Draw all that was kept."""
    rows, lanes = timeline.rows(), timeline.lanes()[:MAX_LANES]
    num_lines = len(rows) + len(lanes)
    drawn = figure(WIDTH_IN, min(MARGIN_IN + 0.22 * max(num_lines, 4), MAX_HEIGHT_IN))
    axes = drawn.add_subplot()
    _draw_rounds(axes, list(rows.values()))
    _draw_transfers(axes, lanes, len(rows))
    _label(axes, timeline, list(rows), len(lanes))
    _legend(axes, bool(lanes))
    save(drawn, path)


def _draw_rounds(axes: Axes, rows: Sequence[Sequence[SimRound]]) -> None:
    """What each rank did, and thinner in grey how much longer its group took."""
    rounds = [(line, r) for line, row in enumerate(rows) for r in row]
    _draw(axes, [Bar(line, r.started_s, r.ends_s - r.started_s, 0.3) for line, r in rounds], GREY)
    for kind, colour in COLOURS.items():
        own = [(line, r) for line, r in rounds if activity(r) is kind]
        _draw(axes, [Bar(line, r.started_s, r.busy_s or r.ends_s - r.started_s, 0.8) for line, r in own], colour)


def _draw_transfers(axes: Axes, lanes: Sequence[Sequence[Transferred]], first_line: int) -> None:
    transfers = [(line, t) for line, lane in enumerate(lanes, first_line) for t in lane]
    _draw(axes, [Bar(line, t.started_s, t.ended_s - t.started_s, 0.6) for line, t in transfers], GREEN)
    exposed = ((line, t, min(t.exposed_s, t.ended_s - t.started_s)) for line, t in transfers)
    _draw(axes, [Bar(line, t.ended_s - waited_s, waited_s, 0.25) for line, t, waited_s in exposed], "black")


def _draw(axes: Axes, bars: Sequence[Bar], colour: str) -> None:
    """One shape for all bars of a line that have a colour; a shape for each bar takes much longer."""
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path as Outline

    for _, of_line in itertools.groupby((bar for bar in bars if bar.length_s > 0), key=lambda bar: bar.line):
        outlines = Outline.make_compound_path_from_polys(np.array([_corners(bar) for bar in of_line]))
        axes.add_artist(PathPatch(outlines, facecolor=colour, linewidth=0))


def _corners(bar: Bar) -> list[tuple[float, float]]:
    end_s, low, high = bar.start_s + bar.length_s, bar.line - bar.height / 2, bar.line + bar.height / 2
    return [(bar.start_s, low), (end_s, low), (end_s, high), (bar.start_s, high)]


def _label(axes: Axes, timeline: Timeline, keys: list[RowKey], num_lanes: int) -> None:
    labels = [*(key.label for key in keys), *([""] * num_lanes)]
    if num_lanes:
        labels[len(keys)] = "transfers"
    step = -(-len(labels) // MAX_LABELS) or 1
    axes.set_yticks(range(0, len(labels), step), labels[::step], fontsize=8)
    axes.set_ylim(max(len(labels), 1) - 0.4, -0.6)
    axes.set_xlim(0, timeline.end_s or 1.0)
    axes.set_xlabel("seconds")
    axes.set_title("\n".join(filter(None, (timeline.title, timeline.note))), fontsize=10, loc="left")


def _legend(axes: Axes, has_transfers: bool) -> None:
    from matplotlib.patches import Patch

    entries = {kind.value: colour for kind, colour in COLOURS.items()} | {WAITS: GREY}
    if has_transfers:
        entries |= {TRANSFER: GREEN, EXPOSED: "black"}
    patches = [Patch(color=colour, label=label) for label, colour in entries.items()]
    axes.legend(
        handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(patches), fontsize=8, frameon=False
    )

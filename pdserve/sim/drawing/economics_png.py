"""The gate's economics as three small pictures: what it gives, what it does to gaps, what it costs in first tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pdserve.sim.drawing.canvas import BLUE, GREEN, GREY, PURPLE, RED, figure, save
from pdserve.sim.economics import Point

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_IN, HEIGHT_IN = 11.0, 4.4
COLOURS = (BLUE, RED, GREEN, PURPLE)


class Panel(NamedTuple):
    """field: of Measures, times `scale` in the picture."""

    field: str
    title: str
    scale: float


PANELS = (
    Panel("output_tokens_per_s", "throughput, output tokens/s", 1.0),
    Panel("itl_p99_s", "p99 ITL, ms", 1e3),
    Panel("ttft_p99_s", "p99 TTFT, s", 1.0),
)


def write(points: Sequence[Point], title: str, path: str | Path) -> None:
    """points: the one without a gate first."""
    drawn = figure(WIDTH_IN, HEIGHT_IN)
    for axes, panel in zip(drawn.subplots(1, len(PANELS)), PANELS, strict=True):
        _draw(axes, points, panel)
    handles, labels = drawn.axes[0].get_legend_handles_labels()
    drawn.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=9, frameon=False)
    drawn.suptitle(title, fontsize=10)
    save(drawn, path)


def _draw(axes: Axes, points: Sequence[Point], panel: Panel) -> None:
    plain, *gated = points
    axes.axhline(_value(plain, panel), color=GREY, linewidth=2, label="no gate")
    any_intervals = sorted({point.any_interval or 0 for point in gated})
    for any_interval, colour in zip(any_intervals, COLOURS, strict=False):
        for fill, style in ((None, "-o"), ("auto", "--s")):
            own = [point for point in gated if (point.any_interval, point.fill) == (any_interval, fill)]
            label = f"N = {any_interval}" + (", fill auto" if fill else "")
            axes.plot(
                [point.attempt_interval or 0 for point in own],
                [_value(point, panel) for point in own],
                style, color=colour, markersize=4, linewidth=1.4, label=label,
            )  # fmt: skip
    _label(axes, panel, sorted({point.attempt_interval or 0 for point in gated}))


def _value(point: Point, panel: Panel) -> float:
    return float(getattr(point.measures, panel.field)) * panel.scale


def _label(axes: Axes, panel: Panel, attempt_intervals: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(attempt_intervals, [str(interval) for interval in attempt_intervals])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("A, rounds")
    axes.set_title(panel.title, fontsize=10)
    axes.grid(alpha=0.3)

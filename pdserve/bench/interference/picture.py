"""The victim's gaps over time, a panel a case."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdserve.bench.interference.served import Row
from pdserve.sim.drawing import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_IN, PANEL_IN = 9.0, 1.6


def write_png(path: str, rows: Sequence[Row]) -> None:
    """Seconds between tokens against seconds since the victim's call; shaded from the attacker's call to its answer.

    Raises StartupError without matplotlib, and where the file can't be written.
    """
    drawn = canvas.figure(WIDTH_IN, PANEL_IN * len(rows))
    panels = drawn.subplots(len(rows), 1, squeeze=False)[:, 0]
    for panel, row in zip(panels, rows, strict=True):
        _draw(panel, row)
    panels[-1].set_xlabel("seconds since the victim's call")
    canvas.save(drawn, path)


def _draw(panel: Axes, row: Row) -> None:
    start_s = row.victim.called_s
    times_s = [arrival_s - start_s for arrival_s in row.victim.arrivals_s[1:]]
    panel.vlines(times_s, 0, row.victim.gaps_s, linewidth=0.8, color=canvas.BLUE)
    if row.attacker is not None:
        span_s = (row.attacker.called_s - start_s, row.attacker.arrivals_s[0] - start_s)
        panel.axvspan(*span_s, color=canvas.RED, alpha=0.15, linewidth=0)
    panel.set_title(row.case.flags, loc="left", fontsize=9)
    panel.set_ylabel("gap, s")
    panel.set_ylim(bottom=0)

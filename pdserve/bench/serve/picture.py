"""A row a load: how TTFT and gaps are distributed, and the share of requests that met the SLO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pdserve.bench.serve.figures import Slo
from pdserve.bench.serve.results import Measured, Results
from pdserve.sim.drawing import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_IN, ROW_IN = 12.0, 2.6
COLOURS = (canvas.BLUE, canvas.RED, canvas.GREEN, canvas.YELLOW, canvas.PURPLE, canvas.CYAN, canvas.GREY)
LINES = ("-", "--", "-.", ":")
# Tokens that came in one message have no gap, which a logarithmic axis has no place for.
LEAST_S = 1e-4


def write_png(path: str, results: Results, slo: Slo) -> None:
    """Raises StartupError without matplotlib, and where the file can't be written."""
    drawn = canvas.figure(WIDTH_IN, ROW_IN * len(results.loads))
    panels = drawn.subplots(len(results.loads), 3, squeeze=False)
    for (waits, gaps, shares), load in zip(panels, results.loads, strict=True):
        measured = results.measured[load]
        heard = {server: one.heard() for server, one in measured.items()}
        _draw_shares(waits, {name: [one.ttft_s for one in answers] for name, answers in heard.items()}, slo.ttft_s)
        _draw_shares(
            gaps,
            {name: [gap_s for one in answers for gap_s in one.gaps_s] for name, answers in heard.items()},
            slo.itl_s,
        )
        _draw_goodput(shares, measured)
        waits.set_ylabel(load)
    for panel, heading in zip(panels[0], ("TTFT", "gaps between tokens", "goodput, strict goodput"), strict=True):
        panel.set_title(heading)
    panels[0][0].legend(fontsize=7)
    canvas.save(drawn, path)


def _draw_shares(panel: Axes, times_s: Mapping[str, Sequence[float]], limit_s: float) -> None:
    """Of all values, the share that is no longer than x; the SLO's limit is dotted."""
    for number, (name, values_s) in enumerate(times_s.items()):
        ordered = sorted(max(value_s, LEAST_S) for value_s in values_s)
        shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
        line, colour = LINES[number % len(LINES)], COLOURS[number % len(COLOURS)]
        panel.step(ordered, shares, where="post", color=colour, linestyle=line, label=name)
    panel.axvline(limit_s, color="black", linestyle=":", linewidth=0.8)
    panel.set_xscale("log")
    panel.set_xlabel("s", fontsize=8)
    panel.set_ylim(0, 1.02)


def _draw_goodput(panel: Axes, measured: Mapping[str, Measured]) -> None:
    """Two bars a server; the strict one is hatched."""
    for number, one in enumerate(measured.values()):
        medians, colour = one.medians, COLOURS[number % len(COLOURS)]
        panel.bar(number - 0.2, medians.get("goodput", 0.0), 0.4, color=colour)
        strict = medians.get("strict_goodput", 0.0)
        panel.bar(number + 0.2, strict, 0.4, color=colour, hatch="///", edgecolor="white", linewidth=0)
    panel.set_xticks(range(len(measured)), measured.keys(), fontsize=7)
    panel.set_ylim(0, 1.02)

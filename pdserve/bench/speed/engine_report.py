"""What `pdserve bench engine` found of each form of the weights, and its tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.bench.speed.limits import Compared
from pdserve.bench.speed.quality import Quality


@dataclass(frozen=True, slots=True)
class Row:
    """One cell. tokens_per_s: of each repetition. round_ms: mean. shares: of the rounds' time, by part.

    limit: what the median is beside it; None where it is not known.
    """

    cell: str
    tokens_per_s: tuple[float, ...]
    round_ms: float
    shares: dict[str, float]
    limit: Compared | None


@dataclass(frozen=True, slots=True)
class Form:
    """One form of the weights."""

    quantization: str
    quality: Quality
    loaded_s: float
    rows: tuple[Row, ...]


def show(forms: Sequence[Form], console: Console) -> None:
    for table in (_speeds(forms), _shares(forms), _qualities(forms)):
        console.print(table)


def _speeds(forms: Sequence[Form]) -> Table:
    columns = ("tokens/s", "of all repeats", "round, ms", "% of limit", "which is of")
    table = Table("weights", "", *columns, box=SIMPLE, collapse_padding=True)
    for form in forms:
        for row in form.rows:
            spread = f"{min(row.tokens_per_s):.0f}–{max(row.tokens_per_s):.0f}"
            speed = f"{statistics.median(row.tokens_per_s):.1f}"
            limit = (_percent(row.limit.share, ".0f"), row.limit.bound_by) if row.limit else ("", "")
            table.add_row(form.quantization, row.cell, speed, spread, f"{row.round_ms:.1f}", *limit)
    return table


def _shares(forms: Sequence[Form]) -> Table:
    parts = list(dict.fromkeys(part for form in forms for row in form.rows for part in row.shares))
    heads = ("weights", "% of a round", *parts)
    table = Table(*heads, box=SIMPLE, collapse_padding=True)
    for form in forms:
        for row in form.rows:
            table.add_row(form.quantization, row.cell, *(_percent(row.shares.get(part, 0.0), ".0f") for part in parts))
    return table


def _qualities(forms: Sequence[Form]) -> Table:
    columns = ("nll, nats a token", "perplexity", "over fp32's, %", "same token as fp32, %", "loaded in, s")
    table = Table("weights", *columns, box=SIMPLE)
    for form in forms:
        quality = form.quality
        beside_fp32 = _percent(quality.over_fp32, "+.2f"), _percent(quality.agreement, ".1f")
        figures = f"{quality.nll:.4f}", f"{quality.perplexity:.3f}", *beside_fp32, f"{form.loaded_s:.1f}"
        table.add_row(form.quantization, *figures)
    return table


def _percent(share: float | None, format_spec: str) -> str:
    return "" if share is None else f"{100 * share:{format_spec}}"

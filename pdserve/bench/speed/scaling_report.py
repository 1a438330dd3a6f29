"""What rounds took by the number of their rows and their context, and its table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from rich.box import SIMPLE
from rich.table import Table

Times = Mapping[int, float | None]


@dataclass(frozen=True, slots=True)
class Scaling:
    """Medians in ms. decode_ms: by batch, then context; None: no room for the KV. chunk_ms: by the chunk's start."""

    quantization: str
    decode_ms: Mapping[int, Times]
    chunk_ms: Times

    @property
    def decode_us(self) -> Mapping[int, Times]:
        """What a further token of a row's context costs, in us: by batch, then the context up to which."""
        return {batch: _slopes(of_batch, batch) for batch, of_batch in self.decode_ms.items()}

    @property
    def chunk_us(self) -> Times:
        """What a further token before a chunk costs it, by the start up to which."""
        return _slopes(self.chunk_ms, 1)

    def figures(self) -> dict[str, object]:
        return asdict(self) | {"decode_us": self.decode_us, "chunk_us": self.chunk_us}


def scaling_table(found: Sequence[Scaling]) -> Table:
    """A chunk's times stand below those of rows whose context is near its start, which is told in brackets."""
    contexts, starts = next(iter(found[0].decode_ms.values())), found[0].chunk_ms
    heads = [f"{_short(context)} ({_short(start)})" for context, start in zip(contexts, starts, strict=True)]
    title = "ms a round, by its rows' context (a chunk's start); us that a further token of it costs a row (the chunk)"
    slopes = (f"us to {_short(context)}" for context in list(contexts)[1:])
    table = Table(
        "weights", "rows", *heads, *slopes, box=SIMPLE, collapse_padding=True, title=title, title_justify="left"
    )
    for scaling in found:
        for batch, times_ms in scaling.decode_ms.items():
            line = *_told(times_ms.values(), ".1f"), *_told(scaling.decode_us[batch].values(), ".2f")
            table.add_row(scaling.quantization, str(batch), *line)
        line = *_told(scaling.chunk_ms.values(), ".1f"), *_told(scaling.chunk_us.values(), ".2f")
        table.add_row(scaling.quantization, "a chunk", *line)
    return table


def _short(num_tokens: int) -> str:
    return f"{num_tokens / 1024:g}k" if num_tokens >= 1024 else str(num_tokens)


def _told(figures: Iterable[float | None], format_spec: str) -> list[str]:
    return ["" if figure is None else f"{figure:{format_spec}}" for figure in figures]


def _slopes(times_ms: Times, num_rows: int) -> Times:
    """us a row and token, between each of the keys and the one before it."""
    found: dict[int, float | None] = {}
    for (before, before_ms), (after, after_ms) in pairwise(times_ms.items()):
        if before_ms is None or after_ms is None:
            found[after] = None
        else:
            found[after] = 1e3 * (after_ms - before_ms) / (num_rows * (after - before))
    return found

"""Rounds of nodes as they are read and shown: one line each, for people and for programs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdserve.client import AsyncClient
from pdserve.errors import DeadlineExceeded, NotReady
from pdserve.rounds import RankRounds, Round

# (the number of the node among those that are read, what came)
Sink = Callable[[int, RankRounds], None]
ABSENT = "–"
HEADING = "    start rank   round gather  forward    total  prefill  dec vote gate"
LEGEND = """start in min:s, times in ms; prefill: rows/tokens; gate: any, all, burst and
idle are open, with - it is closed, with * to a prefill that this rank wanted"""


@dataclass(frozen=True, slots=True)
class Noted:
    """A round, and whose it was. node: its number among those that are read."""

    node: int
    rank: int
    unix_offset_us: int
    round: Round

    @property
    def start_unix_us(self) -> int:
        return self.round.start_us + self.unix_offset_us


def noted(node: int, batch: RankRounds) -> list[Noted]:
    return [Noted(node, batch.rank, batch.unix_offset_us, one) for one in batch.rounds]


def read_rounds(targets: Sequence[str], last: int, seconds: float | None, timeout_s: float, sink: Sink) -> None:
    """Of all nodes at once: those that are over, or, for so many seconds, those that come too.

    Raises what the first of them to fail says.
    """

    async def read_all() -> None:
        await asyncio.gather(*(_read(n, target, last, seconds, timeout_s, sink) for n, target in enumerate(targets)))

    asyncio.run(read_all())


async def _read(node: int, target: str, last: int, seconds: float | None, timeout_s: float, sink: Sink) -> None:
    follows = seconds is not None
    async with AsyncClient(target, max_attempts=1) as client:
        try:
            async for batch in client.rounds(last=last, follow=follows, timeout_s=seconds if follows else timeout_s):
                sink(node, batch)
        except DeadlineExceeded:
            if not follows:
                raise NotReady(f"{target} did not tell all its rounds within {timeout_s:g} s") from None


# ---------------------------------------------------------------- lines


def line_of(one: Noted, num_nodes: int) -> str:
    """80 columns at most, for rounds of less than a minute. A node's letter is told where there are several."""
    what = one.round
    prefill = f"{what.num_prefill_rows}/{what.num_prefill_tokens}" if what.num_prefill_rows else ""
    words = (
        f"{_clock(one.start_unix_us):>9}",
        f"{rank_name(one.node, one.rank, num_nodes):>4}",
        f"{what.step:>7}",
        f"{_ms(what.gather_us):>6}",
        f"{_ms(what.forward_us):>8}",
        f"{_ms(what.total_us):>8}",
        f"{prefill:>8}",
        f"{what.num_decode_rows or '':>4}",
        f"{ABSENT if what.vote is None else 'yes' if what.vote else 'no':4}",
        _gate(what),
    )
    return " ".join(words)


def rank_name(node: int, rank: int, num_nodes: int) -> str:
    """0, or A0 where there are several nodes."""
    return f"{letter(node)}{rank}" if num_nodes > 1 else str(rank)


def letter(node: int) -> str:
    return chr(ord("A") + node)


def _clock(unix_us: int) -> str:
    """Minutes, seconds and milliseconds of the hour."""
    return f"{time.strftime('%M:%S', time.localtime(unix_us // 1_000_000))}.{unix_us % 1_000_000 // 1000:03}"


def _ms(us: int | None) -> str:
    return ABSENT if us is None else f"{us / 1000:.1f}"


def _gate(what: Round) -> str:
    if what.decision is None:
        return ABSENT
    held = "*" if what.is_held else ""
    return f"{'' if what.decision.is_open else '-'}{what.decision.value}{held}"


def figures(one: Noted, target: str) -> dict[str, object]:
    """Under stable names, for a program. What there was none of is null."""
    decision = one.round.decision
    return {
        "node": target,
        "rank": one.rank,
        "start_unix_us": one.start_unix_us,
        **one.round._asdict(),
        "decision": decision.value if decision is not None else None,
        "is_open": decision.is_open if decision is not None else None,
    }

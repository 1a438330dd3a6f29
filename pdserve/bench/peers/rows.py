"""A prompt that arrives beside running streams, on one engine's prefill and decode nodes."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.bench.listening import Call, Heard, unique_prompt
from pdserve.bench.waiting import until

# The streams' prompts are short, and the streams are under way before the prompt arrives.
STREAM_PROMPT, NUM_BEFORE = 64, 8
# More than any stream says meanwhile; each is given up when the prompt is answered.
MOST_STREAMED = 6000
# The answer to the prompt: long enough for the gap at its joining to be seen, whichever stream has it.
NUM_ASKED = 24
POLL_S = 0.005


class Engine(Protocol):
    """Nodes that answer calls."""

    async def hear(self, call: Call, is_enough: Callable[[int], bool]) -> Heard:
        """Call now and listen to the end, or until so many tokens are enough."""


@dataclass(frozen=True, slots=True)
class Row:
    """num_tokens: of the prompt; num_streams: that ran beside it. Seconds; ITL and gaps are the streams' meanwhile."""

    num_tokens: int
    num_streams: int
    ttft_s: float
    itl_s: float
    worst_gap_s: float
    first_tokens: tuple[int, ...] = ()


def median_row(rows: Sequence[Row]) -> Row:
    """Each figure's median over repeats of one row."""

    def median(figure: Callable[[Row], float]) -> float:
        return statistics.median(figure(row) for row in rows)

    first = rows[0]
    return Row(
        first.num_tokens,
        first.num_streams,
        median(lambda row: row.ttft_s),
        median(lambda row: row.itl_s),
        median(lambda row: row.worst_gap_s),
        first.first_tokens,
    )


async def measure(engine: Engine, text: Sequence[int], num_tokens: int, num_streams: int, repeat: int) -> Row:
    """Streams, then the prompt; over when the prompt is answered. Prompts are unlike each other, but for engines."""
    seed = f"{num_tokens} {num_streams} {repeat}"
    calls = [
        Call(number, unique_prompt(text, STREAM_PROMPT, f"stream {seed} {number}"), MOST_STREAMED)
        for number in range(num_streams)
    ]
    prompt = Call(num_streams, unique_prompt(text, num_tokens, f"prompt {seed}"), NUM_ASKED)
    num_heard = [0] * num_streams
    is_answered = False

    def listener(number: int) -> Callable[[int], bool]:
        def is_enough(num_so_far: int) -> bool:
            num_heard[number] = num_so_far
            return is_answered

        return is_enough

    async with asyncio.TaskGroup() as group:
        streams = [group.create_task(engine.hear(call, listener(call.number))) for call in calls]
        await until(lambda: min(num_heard) >= NUM_BEFORE, poll_s=POLL_S)
        heard = await engine.hear(prompt, lambda num_so_far: False)
        is_answered = True
    return row_of(num_tokens, heard, [stream.result() for stream in streams])


def row_of(num_tokens: int, prompt: Heard, streams: Sequence[Heard]) -> Row:
    """The streams' gaps count that end while the prompt is computed, handed over and answered."""
    gaps_s = [gap_s for stream in streams for gap_s in _gaps_between(stream, prompt.called_s, prompt.arrivals_s[-1])]
    return Row(
        num_tokens, len(streams), prompt.ttft_s, statistics.median(gaps_s), max(gaps_s), prompt.token_ids[:NUM_ASKED]
    )


def _gaps_between(stream: Heard, begin_s: float, end_s: float) -> Iterator[float]:
    for gap_s, at_s in zip(stream.gaps_s, stream.arrivals_s[1:], strict=True):
        if begin_s <= at_s <= end_s:
            yield gap_s

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest

from pdserve.bench.listening import Call, Heard
from pdserve.bench.peers.rows import (
    MOST_STREAMED,
    NUM_ASKED,
    NUM_BEFORE,
    STREAM_PROMPT,
    Row,
    measure,
    median_row,
    row_of,
)
from pdserve.bench.peers.run import Compared

TEXT = tuple(range(50))


def test_only_gaps_that_end_while_the_prompt_is_answered_count() -> None:
    prompt = Heard(1, 10.0, (12.0, 13.0), (7, 8))
    stream = Heard(0, 0.0, (1.0, 9.0, 10.5, 11.0, 12.75, 13.5))
    row = row_of(1000, prompt, [stream])
    assert (row.num_tokens, row.num_streams, row.ttft_s) == (1000, 1, 2.0)
    assert (row.itl_s, row.worst_gap_s) == (1.5, 1.75)
    assert row.first_tokens == (7, 8)


def test_a_row_of_repeats_has_the_median_of_each_figure() -> None:
    rows = [Row(128, 8, ttft_s, itl_s, gap_s) for ttft_s, itl_s, gap_s in [(1, 6, 9), (2, 5, 7), (3, 4, 8)]]
    assert median_row(rows) == Row(128, 8, 2, 5, 8)


@pytest.mark.parametrize(("theirs", "is_ahead"), [((2, 2, 2), True), ((2, 2, 0.5), False), ((1, 2, 2), False)])
def test_ahead_is_ahead_in_every_figure(theirs: tuple[float, float, float], is_ahead: bool) -> None:
    compared = Compared(Row(128, 1, 1, 1, 1), Row(128, 1, *theirs))
    assert compared.is_ahead is is_ahead
    assert list(compared.ratios().values()) == list(theirs)


class ByTurns:
    """Everybody's next token comes at each turn of the event loop; notes who was asked what, and when."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.num_streamed = 0
        self._clock = itertools.count()

    async def hear(self, call: Call, is_enough: Callable[[int], bool]) -> Heard:
        self.calls.append(call)
        called, arrivals = next(self._clock), []
        while len(arrivals) < call.num_output_tokens:
            await asyncio.sleep(0)
            arrivals.append(next(self._clock))
            if is_enough(len(arrivals)):
                break
        if call.num_output_tokens == MOST_STREAMED:
            self.num_streamed = max(self.num_streamed, len(arrivals))
        return Heard(call.number, called, tuple(arrivals), tuple(range(len(arrivals))))


async def test_the_prompt_comes_when_every_stream_is_under_way_and_ends_them() -> None:
    engine = ByTurns()
    row = await measure(engine, TEXT, 300, 3, repeat=0)
    assert [len(call.prompt) for call in engine.calls] == [STREAM_PROMPT] * 3 + [300]
    assert len({call.prompt[:8] for call in engine.calls}) == 4
    assert NUM_BEFORE <= engine.num_streamed < MOST_STREAMED
    assert (row.num_tokens, row.num_streams) == (300, 3)
    assert row.first_tokens == tuple(range(NUM_ASKED))

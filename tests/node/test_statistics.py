"""What a node logs of itself while its ranks report, and while they don't."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from pdserve.errors import NotReady
from pdserve.node.site import Parts
from pdserve.node.statistics import log_stats
from pdserve.request import RankLoad

SILENT = "the rank did not report its load within 10 s"


class Reports:
    """What the ranks say, look by look; None is a silence. `over` is set when the last look was taken and logged."""

    def __init__(self, *output_tokens: int | None) -> None:
        self._looks = iter(output_tokens)
        self.over = asyncio.Event()

    async def __call__(self) -> list[RankLoad]:
        try:
            tokens = next(self._looks)
        except StopIteration:
            self.over.set()
            return await asyncio.Event().wait()  # type: ignore[return-value]  # never
        if tokens is None:
            raise NotReady(SILENT)
        counters = {"output_tokens": tokens, "prompt_tokens_computed": 0}
        return [RankLoad(0, 1, 0, 0, 64, 3, 5, counters=counters)]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level("INFO", "pdserve.node.statistics")
    return lambda: [record.getMessage() for record in caplog.records]


async def log_all(reports: Reports, *times: float) -> None:
    """times: of the clock at the start and at each report."""
    clock = iter(times)
    task = asyncio.create_task(log_stats(Parts([], reports), 0.0, lambda: next(clock)))
    over = asyncio.create_task(reports.over.wait())
    await asyncio.wait([task, over], return_when=asyncio.FIRST_COMPLETED)
    assert not task.done(), task.exception()
    task.cancel()


async def test_a_silence_is_told_once_and_then_that_it_is_over(logged: Callable[[], list[str]]) -> None:
    await log_all(Reports(5, *[None] * 8, 5, None, None, 5), 0, 10, 100, 130)
    told = [line.partition(",")[0] for line in logged()]
    begins, over = f"no statistics until it is over: {SILENT}", "statistics again"
    assert told == ["1 running", begins, over, begins, over]


async def test_rates_are_of_the_time_since_the_last_report(logged: Callable[[], list[str]]) -> None:
    await log_all(Reports(0, None, None, None, 80), 100, 110, 150)
    assert "statistics again, after 40 s without" in logged()
    assert "0.0 prompt and 2.0 output tokens/s" in logged()[-1]

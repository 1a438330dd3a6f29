"""Work beside the services never ends in silence."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pdserve.node.waiting import background


async def goes_on() -> None:
    await asyncio.Event().wait()


async def ends() -> None:
    pass


async def fails() -> None:
    raise ValueError("for a reason")


async def test_work_that_ends_is_told(caplog: pytest.LogCaptureFixture) -> None:
    async with background(goes_on(), ends()) as any_ended:
        await any_ended
    assert [record.message for record in caplog.records] == [
        "background work ended, which it should not: the node ends"
    ]


async def test_work_that_fails_is_told_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    async with background(goes_on(), fails()) as any_ended:
        await any_ended
    assert [record.message for record in caplog.records] == ["background work failed: the node ends"]
    assert "for a reason" in caplog.text


async def test_work_that_is_cancelled_with_the_block_is_not(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        async with background(goes_on(), goes_on()) as any_ended:
            assert not any_ended.done()
    assert not caplog.records

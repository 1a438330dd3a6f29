"""Fallbacks are all counted, and a storm of them is told in a few lines."""

from __future__ import annotations

import asyncio

import pytest

from decode_node.fallbacks import Fallbacks
from pdserve.errors import PeerError
from pdserve.request import RequestId

ERROR = PeerError("gone")


async def test_a_storm_is_counted_in_full_and_told_in_two_lines(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks = Fallbacks(interval_s=0.01)
    for number in range(1000):
        fallbacks.add(RequestId(f"r{number}"), "no_peer" if number % 2 else "transfer_failed", ERROR)
    assert fallbacks.counters == {
        "decode_fallback_total": 1000,
        "decode_fallback_total:no_peer": 500,
        "decode_fallback_total:transfer_failed": 500,
    }
    async with asyncio.timeout(5):
        while len(caplog.records) < 2:  # noqa: ASYNC110 - nothing would set an event for it
            await asyncio.sleep(0)
    first, summary = (record.getMessage() for record in caplog.records)
    assert first == "prefilling r0 locally (transfer_failed): gone"
    assert summary == (
        "999 more within 0.01 s (prefilled locally: no_peer 500, prefilled locally: transfer_failed 499); "
        "the last: prefilling r999 locally (no_peer): gone"
    )


async def test_what_fails_by_policy_is_counted_apart(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks = Fallbacks()
    fallbacks.refuse(RequestId("r0"), "peer_busy", ERROR)
    assert fallbacks.counters["decode_fallback_total"] == 0
    assert fallbacks.counters["decode_fallback_refused_total:peer_busy"] == 1
    assert [record.getMessage() for record in caplog.records] == ["failing r0 (peer_busy): gone"]

"""Fallbacks are all counted, and a storm of them is told in a few lines."""

from __future__ import annotations

import asyncio

import pytest

from decode_node.fallbacks import Fallbacks
from pdserve.errors import PeerError, PeerMismatch
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


async def test_a_mismatch_is_told_once_and_counted_for_each_request(caplog: pytest.LogCaptureFixture) -> None:
    fallbacks = Fallbacks(interval_s=0.0)
    for number in range(5):
        fallbacks.add(RequestId(f"r{number}"), "peer_mismatch", PeerMismatch("block_size: 16 here, 32 there"))
        await asyncio.sleep(0.001)  # past the interval: nothing but the mismatch keeps the others from being told
    fallbacks.refuse(RequestId("r5"), "peer_mismatch", PeerMismatch("dtype: float32 here, bfloat16 there"))
    assert fallbacks.counters["decode_fallback_total:peer_mismatch"] == 5
    assert [record.getMessage() for record in caplog.records] == [
        "prefilling r0 locally (peer_mismatch): block_size: 16 here, 32 there",
        "failing r5 (peer_mismatch): dtype: float32 here, bfloat16 there",
    ]


async def test_a_prompt_that_goes_to_another_peer_is_told_and_a_storm_of_them_summed_up(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fallbacks = Fallbacks(interval_s=0.01)
    for number in range(3):
        fallbacks.retry(RequestId(f"r{number}"), "a:1", "b:2", ERROR)
    async with asyncio.timeout(5):
        while len(caplog.records) < 2:  # noqa: ASYNC110 - nothing would set an event for it
            await asyncio.sleep(0)
    assert [record.getMessage() for record in caplog.records] == [
        "prefilling r0 at b:2 after a:1 failed with it: gone",
        "2 more within 0.01 s (tried again at b:2 2); the last: prefilling r2 at b:2 after a:1 failed with it: gone",
    ]

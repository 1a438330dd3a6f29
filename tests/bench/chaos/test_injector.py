"""What is under way when a run is given up, and what failed before it was asked for."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import pytest

from pdserve.bench.chaos.faults import Fault, FaultKind, Injector
from pdserve.bench.chaos.fleet import Fleet
from pdserve.bench.control_proxy import ControlProxy


async def quiet(timeout_s: float) -> None:
    """Nothing is in flight."""


@pytest.fixture
def injector(monkeypatch: pytest.MonkeyPatch) -> Injector:
    """Of one control channel, whose only fault is told by `carry_out`."""
    fleet = Fleet([], [])
    injector = Injector(fleet, {}, quiet, lambda: None, Random(0), {FaultKind.CUT: 1})

    async def aimed(self: Injector, kind: FaultKind, phase: object) -> tuple[str, ...]:
        return ("D0", "P0")

    monkeypatch.setattr(Injector, "_aim", aimed)
    fleet.proxies["D0", "P0"] = ControlProxy("127.0.0.1:1")
    return injector


def carry_out(monkeypatch: pytest.MonkeyPatch, what: Any) -> None:
    async def carried_out(self: Injector, fault: Fault) -> None:
        await what()

    monkeypatch.setattr(Injector, "_carry_out", carried_out)


async def test_a_recovery_that_failed_is_raised_however_long_ago(
    injector: Injector, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise TimeoutError("it never served again")

    carry_out(monkeypatch, fail)
    await injector.inject()
    await asyncio.sleep(0)
    with pytest.raises(TimeoutError, match="never served again"):
        await injector.settled()
    await injector.end()


async def test_a_run_that_is_given_up_leaves_no_recovery_behind(
    injector: Injector, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out(monkeypatch, asyncio.Event().wait)
    await injector.inject()
    before = asyncio.all_tasks()
    assert len(before) == 2
    await injector.end()
    assert asyncio.all_tasks() == {asyncio.current_task()}

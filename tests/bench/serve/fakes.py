"""Servers without a model, for those who drive them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from pdserve.bench.listening import Call, Heard
from pdserve.bench.serve.clients import Asked, Driven, RequestFailed


class FakeServer:
    """Answers each call once other tasks had their turn, unless `fails` says with what it fails."""

    def __init__(self, fails: Callable[[Call], Exception | None] = lambda call: None) -> None:
        self.calls: list[Call] = []
        self.called_s: list[float] = []
        self.num_open = 0
        self.most_open = 0
        self._fails = fails

    async def hear(self, call: Call) -> Heard:
        called_s = time.monotonic()
        self.calls.append(call)
        self.called_s.append(called_s)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await self.work(call)
            if error := self._fails(call):
                raise error
        finally:
            self.num_open -= 1
        return Heard(call.number, called_s, (time.monotonic(),) * call.num_output_tokens)

    async def work(self, call: Call) -> None:
        for _ in range(3):
            await asyncio.sleep(0)


class Together(FakeServer):
    """Answers nobody before so many have called."""

    def __init__(self, num_calls: int) -> None:
        super().__init__()
        self._num_calls = num_calls
        self._have_called = asyncio.Event()

    async def work(self, call: Call) -> None:
        if len(self.calls) == self._num_calls:
            self._have_called.set()
        await self._have_called.wait()


def refused(call: Call) -> Exception | None:
    """Every third request is."""
    return RequestFailed("the queue is full", is_refused=True) if call.number % 3 == 2 else None


def heard(*arrivals_s: float, called_s: float = 0.0) -> Heard:
    return Heard(0, called_s, arrivals_s)


def asked(answer: Heard, num_prompt_tokens: int = 10) -> Asked:
    call = Call(answer.number, tuple(range(num_prompt_tokens)), len(answer.arrivals_s))
    return Asked(call, answer.arrivals_s[-1], answer)


def failed(reason: str, is_refused: bool = False) -> Asked:
    return Asked(Call(0, (1,), 1), 0.0, None, reason, is_refused)


def driven(*requests: Asked, full_s: float = 10.0, long_prompt: Asked | None = None) -> Driven:
    return Driven(requests, 0.0, full_s, long_prompt)

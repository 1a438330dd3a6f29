"""What lies between the nodes of a test: their control channel, watched and disturbed, and callers beside it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from pdserve.bench.control_proxy import ControlProxy
from pdserve.bench.handoff_witness import Passed, Phase, Witness
from pdserve.client import Answer
from pdserve.errors import PdserveError
from tests.system.nodes import PATIENCE_S, Node

T = TypeVar("T")


class Control:
    """Decode nodes that are given `address` reach the prefill node at `target` through a proxy and past a witness.

    Both live on an event loop of their own, so that a test may wait as it likes.
    """

    def __init__(self, target: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="control", daemon=True)
        self._thread.start()
        self.witness, self.proxy = self._run(self._start(target))

    async def _start(self, target: str) -> tuple[Witness, ControlProxy]:
        witness = Witness(target)
        proxy = ControlProxy(await witness.start())
        await proxy.start()
        return witness, proxy

    @property
    def address(self) -> str:
        return self.proxy.address

    def close(self) -> None:
        self._run(self.proxy.close())
        self._run(self.witness.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def do(self, change: Callable[[ControlProxy], None]) -> None:
        """Disturb the channel; in force when this returns."""

        async def apply() -> None:
            change(self.proxy)

        self._run(apply())

    def count(self, kind: str) -> int:
        """Messages of that kind that have passed."""
        return sum(passed.kind == kind for passed in list(self.witness.log))

    def wait_for(self, kind: str, before: int) -> Passed:
        """The next message of that kind after the first `before` ones."""
        return self._run(self.witness.until(kind, before + 1))

    def phases(self) -> dict[str, Phase]:
        return dict(self.witness.phases)


class Asking(threading.Thread):
    """One greedy answer, waited for in a thread of its own."""

    def __init__(self, node: Node, prompt: Sequence[int], max_new_tokens: int, **options: Any) -> None:
        super().__init__(daemon=True)
        self._node = node
        self._prompt = prompt
        self._max_new_tokens = max_new_tokens
        self._options = options
        self._answer: Answer | None = None
        self.error: PdserveError | None = None
        self.start()

    def run(self) -> None:
        try:
            self._answer = self._node.ask(self._prompt, self._max_new_tokens, **self._options)
        except PdserveError as error:
            self.error = error

    def result(self) -> Answer:
        self.join(PATIENCE_S)
        assert self._answer is not None, f"{self.error!r}\n{self._node.log[-3000:]}"
        return self._answer

    def fate(self) -> PdserveError | None:
        """What it failed with, once it is over."""
        self.join(PATIENCE_S)
        assert not self.is_alive(), f"never answered\n{self._node.log[-3000:]}"
        return self.error


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """The processes are frozen as long as the block lasts."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)

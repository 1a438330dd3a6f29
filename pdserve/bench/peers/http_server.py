"""A peer's HTTP server in a process of its own: started, asked for streamed completions, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

from pdserve.bench.listening import Call, Heard
from pdserve.config.environment import without_settings
from pdserve.errors import StartupError

START_S, LOOK_S = 300.0, 0.1
ANSWER_S = 900.0
MOST_STREAMS = 256
END_OF_LOG = 2000


class ServerFailed(Exception):
    """A request got no answer; what its caller was told."""


@dataclass(slots=True)
class HttpServer:
    """A server process with all that it starts. environment: what it gets beside our variables.

    when_healthy: called with its process id each time it has come up.
    """

    name: str
    command: Sequence[str]
    port: int
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    when_healthy: Callable[[int], None] = lambda pid: None
    process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                env={**without_settings(), **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_until_healthy(self) -> None:
        """Raises StartupError where it ends before, or is not healthy in time."""
        deadline_s = time.monotonic() + START_S
        while not self._is_healthy():
            if self.process is None or self.process.poll() is not None or time.monotonic() > deadline_s:
                raise StartupError(f"{self.name} did not start; its log ends with:\n{self._end_of_log()}")
            time.sleep(LOOK_S)
        assert self.process is not None
        self.when_healthy(self.process.pid)

    def kill(self) -> None:
        """All of it at once, as when a machine dies."""
        if self.process is None:
            return
        # Also where the server has ended: what it started may live on.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process = None

    def post(self, path: str, body: Mapping[str, object], timeout_s: float = ANSWER_S) -> IO[bytes]:
        """The reply, still to be read; timeout_s: without a byte of it. Raises ServerFailed."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            reply: IO[bytes] = urllib.request.urlopen(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            raise ServerFailed(f"HTTP {error.code}") from None
        except OSError as error:
            raise ServerFailed(_told(error)) from None
        return reply

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except OSError:
            return False

    def _end_of_log(self) -> str:
        return self.log.read_text(errors="replace")[-END_OF_LOG:]


@dataclass(frozen=True, slots=True)
class Completions:
    """How a server is asked for tokens. body: of a prompt and a number of tokens; tokens: of one event of the reply."""

    path: str
    body: Callable[[Sequence[int], int], Mapping[str, object]]
    tokens: Callable[[Mapping[str, Any]], list[int]]

    def stream(
        self,
        server: HttpServer,
        prompt: Sequence[int],
        num_tokens: int,
        more: Mapping[str, object] | None = None,
        timeout_s: float = ANSWER_S,
    ) -> Iterator[list[int]]:
        """The answer's tokens as they come, all within timeout_s. more: goes into the body too.

        Raises ServerFailed where the stream ends with an error, early or too late.
        """
        deadline_s = time.monotonic() + timeout_s
        num_seen = 0
        with server.post(self.path, {**self.body(prompt, num_tokens), **(more or {})}, timeout_s) as reply:
            for event in _events(reply):
                if "error" in event:
                    raise ServerFailed(f"an error in the stream: {event['error']}")
                if time.monotonic() > deadline_s:
                    raise ServerFailed(f"{num_seen} of {num_tokens} tokens came in {timeout_s:g} s")
                new = self.tokens(event)
                num_seen += len(new)
                yield new
        if num_seen < num_tokens:
            raise ServerFailed(f"the stream ended after {num_seen} of {num_tokens} tokens")


def to_the_end(num_tokens: int) -> bool:
    return False


def listen(call: Call, pieces: Iterable[Sequence[int]], is_enough: Callable[[int], bool] = to_the_end) -> Heard:
    """Takes in an answer's pieces as they come, from now to its end or until so many tokens are enough."""
    called_s = time.monotonic()
    token_ids: list[int] = []
    arrivals_s: list[float] = []
    for new in pieces:
        token_ids += new
        arrivals_s += [time.monotonic()] * len(new)
        if is_enough(len(token_ids)):
            break
    return Heard(call.number, called_s, tuple(arrivals_s), tuple(token_ids))


@dataclass(slots=True)
class CompletionServer:
    """A server that is up, and the threads that listen to its answers."""

    server: HttpServer
    completions: Completions
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(MOST_STREAMS))

    @property
    def pid(self) -> int:
        assert self.server.process is not None
        return self.server.process.pid

    async def hear(self, call: Call, is_enough: Callable[[int], bool] = to_the_end) -> Heard:
        """Call now and listen to the end, or until so many tokens are enough. Raises ServerFailed."""
        pieces = self.completions.stream(self.server, call.prompt, call.num_output_tokens)
        return await asyncio.wrap_future(self._threads.submit(listen, call, pieces, is_enough))

    def hear_all(self, calls: Sequence[Call]) -> list[Heard]:
        """Every answer, in the order of `calls`; each request leaves at its time whether or not others have ended.

        Returns when every answer has ended. Raises ServerFailed where one failed.
        """
        return asyncio.run(self._hear_all(calls))

    async def _hear_all(self, calls: Sequence[Call]) -> list[Heard]:
        async def later(call: Call) -> Heard:
            await asyncio.sleep(call.at_s - (time.monotonic() - began_s))
            return await self.hear(call)

        began_s = time.monotonic()
        answers = await asyncio.gather(*map(later, calls), return_exceptions=True)
        heard = []
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
            heard.append(answer)
        return heard

    def end(self) -> None:
        self.server.kill()
        self._threads.shutdown(cancel_futures=True)


@contextlib.contextmanager
def serving(server: HttpServer, completions: Completions) -> Iterator[CompletionServer]:
    """The server up, until the block ends."""
    running = CompletionServer(server, completions)
    try:
        server.begin()
        server.wait_until_healthy()
        yield running
    finally:
        running.end()


def _events(reply: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Of a stream of server-sent events, among which there may be comments: a server keeps the line open with them."""
    try:
        for line in reply:
            name, _, text = line.decode().partition(":")
            if name == "data" and text.strip() != "[DONE]":
                yield json.loads(text)
    except (OSError, HTTPException) as error:
        raise ServerFailed(_told(error)) from None


def _told(error: OSError | HTTPException) -> str:
    reason = getattr(error, "reason", None) or error
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__

"""Libraries in processes of their own (child.py), from this side."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pdserve.bench.listening import Call, Heard
from pdserve.bench.speed.engines import EngineFailed
from pdserve.config.environment import without_settings

START_S, ANSWER_S, ENDING_S = 300.0, 900.0, 10.0
END_OF_LOG = 300


class Child:
    """A process that answers by lines. log: what it says beside them."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._log = log
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True, env=without_settings()
            )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def wait_until_ready(self) -> None:
        """Raises EngineFailed."""
        self._next_line(START_S)

    def hear_all(self, calls: Sequence[Call]) -> list[Heard]:
        """All of them as one batch. Raises EngineFailed."""
        (num_tokens,) = {call.num_output_tokens for call in calls}
        asked = {"prompts": [call.prompt for call in calls], "num_tokens": num_tokens}
        assert self._process.stdin is not None
        try:
            print(json.dumps(asked), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise EngineFailed(self._how_it_ended()) from None
        line = self._next_line(ANSWER_S)
        heard = [
            Heard(call.number, line["called_s"], tuple(arrivals_s))
            for call, arrivals_s in zip(calls, line["arrivals_s"], strict=True)
        ]
        if any(len(answer.arrivals_s) != num_tokens for answer in heard):
            raise EngineFailed(f"answers of {[len(answer.arrivals_s) for answer in heard]} tokens, not {num_tokens}")
        return heard

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        """In a thread of its own: a wait for a line has a deadline. An empty line says that there are no more."""
        assert self._process.stdout is not None
        with contextlib.suppress(ValueError):
            for line in self._process.stdout:
                self._lines.put(line)
        self._lines.put("")

    def _next_line(self, timeout_s: float) -> Mapping[str, Any]:
        try:
            text = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            self.end()
            raise EngineFailed(f"no answer in {timeout_s:g} s") from None
        if not text:
            raise EngineFailed(self._how_it_ended())
        try:
            line: Mapping[str, Any] = json.loads(text)
        except ValueError:
            raise EngineFailed(f"it said {text.strip()!r}") from None
        if "error" in line:
            raise EngineFailed(line["error"])
        return line

    def _how_it_ended(self) -> str:
        """Its last words may come after it has closed its output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ENDING_S)
        self.end()
        said = self._log.read_text(errors="replace").strip()[-END_OF_LOG:]
        return f"its process ended (status {self._process.returncode}): {said or 'it said nothing'}"


@contextlib.contextmanager
def running_child(command: Sequence[str], log: Path) -> Iterator[Child]:
    """It is ready, until the block ends."""
    child = Child(command, log)
    try:
        child.wait_until_ready()
        yield child
    finally:
        child.end()

"""llama.cpp built natively: by its own tools, and through its own server."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pdserve.bench.peers.http_server import CompletionServer
from pdserve.bench.peers.installed import llama_binaries, llama_gguf, llama_version
from pdserve.bench.peers.llama_server import llama_server
from pdserve.bench.speed.cells import Cell
from pdserve.bench.speed.engines import Answering, Engine, EngineFailed, Running, Setting

# What the embedded model's GGUF holds.
WEIGHTS = "Q4_1"
TOOL_S = 900.0


def tools(setting: Setting) -> Engine:
    """llama-bench and llama-batched-bench, a process a cell; they warm up themselves."""

    def start() -> contextlib.AbstractContextManager[Running]:
        return contextlib.nullcontext(Tools(setting))

    return Engine("llama.cpp", WEIGHTS, llama_version(setting.peers), start, is_peer=True, is_called_anew=True)


class Tools:
    """Their own figures of their own prompts."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    def speed(self, cell: Cell, text: Sequence[int], repeat: int) -> float:
        tool, words, read = self._call(cell)
        command = [str(llama_binaries(self._setting.peers) / tool), "-m", str(llama_gguf(self._setting.peers))]
        return read(run_tool([*command, "-t", str(self._setting.num_threads), *words]))

    def _call(self, cell: Cell) -> tuple[str, Sequence[str], Callable[[str], float]]:
        if cell.num_streams == 1:
            return "llama-bench", bench_words(cell), bench_speed
        return "llama-batched-bench", batched_words(cell), batched_speed


def bench_words(cell: Cell) -> list[str]:
    """-d: the context that is there before what is timed."""
    if cell.is_of_prompt:
        words = ["-p", str(cell.num_prompt_tokens), "-n", "0"]
    else:
        words = ["-p", "0", "-n", str(cell.num_tokens), "-d", str(cell.num_prompt_tokens)]
    return [*words, "-r", "1", "-o", "json"]


def bench_speed(output: str) -> float:
    """Of what llama-bench printed."""
    (row,) = json.loads(output)
    return float(row["avg_ts"])


def batched_words(cell: Cell) -> list[str]:
    words = ["-npp", str(cell.num_prompt_tokens), "-ntg", str(cell.num_tokens), "-npl", str(cell.num_streams)]
    return [*words, "-c", str(cell.total_tokens), "--output-format", "jsonl"]


def batched_speed(output: str) -> float:
    """Of what llama-batched-bench printed. Raises EngineFailed where it left the cell out."""
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if not rows:
        raise EngineFailed("llama-batched-bench left it out")
    return float(rows[0]["speed_tg"])


def run_tool(command: Sequence[str]) -> str:
    """Its standard output. Raises EngineFailed."""
    tool = Path(command[0]).name
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_S, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        raise EngineFailed(f"{tool} took over {TOOL_S:g} s") from None
    if ran.returncode:
        last = (ran.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise EngineFailed(f"{tool} ended with {ran.returncode}: {last}")
    return ran.stdout


def server(setting: Setting) -> Engine:
    """Through HTTP, with as many slots as the cell has streams: one slot more would cost the others context."""

    @contextlib.contextmanager
    def start() -> Iterator[Slots]:
        with contextlib.ExitStack() as stack:
            slots = Slots(setting, stack)
            slots.of(setting.cells[0].num_streams)
            yield slots

    return Engine("llama-server", WEIGHTS, llama_version(setting.peers), start, is_peer=True)


class Slots:
    """A server whose number of slots can change, by a start anew. stack: ends the last one."""

    def __init__(self, setting: Setting, stack: contextlib.ExitStack) -> None:
        self._setting = setting
        self._stack = stack
        self._num_slots = 0
        self._server: CompletionServer | None = None

    def of(self, num_slots: int) -> Answering:
        """Warm."""
        setting = self._setting
        if self._server is None or num_slots != self._num_slots:
            self._stack.close()
            binaries, gguf = llama_binaries(setting.peers), llama_gguf(setting.peers)
            room = setting.stream_tokens(num_slots)
            starting = llama_server(binaries, gguf, setting.folder, num_slots, room)
            self._server, self._num_slots = self._stack.enter_context(starting), num_slots
            Answering(self._server.hear_all).warm(setting.model.text)
        return Answering(self._server.hear_all)

    def speed(self, cell: Cell, text: Sequence[int], repeat: int) -> float:
        return self.of(cell.num_streams).speed(cell, text, repeat)

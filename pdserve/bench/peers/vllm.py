"""vLLM's prefill and decode nodes over NIXL, a core each, in an environment of their own.

Written against vLLM 0.32's documentation of disaggregated prefill: a request goes to the prefill node for one token,
and then, with the kv_transfer_params of that answer, to the decode node, which pulls the KV and streams the answer.
"""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pdserve.bench.listening import Call, Heard
from pdserve.bench.processes import with_descendants
from pdserve.config.environment import without_settings
from pdserve.config.ports import free_port
from pdserve.errors import StartupError
from pdserve.model.progress import Progress

START_S, LOOK_S = 300.0, 0.5
ANSWER_S = 900.0
KV_GB = 4
MOST_STREAMS = 32
NAME = "model"
UNKNOWN_YET = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
ASK_REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(UNKNOWN_YET)}
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
SETTINGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "8192", "--no-enable-prefix-caching")


class VllmFailed(Exception):
    """A request got no answer; what its caller was told."""


@dataclass(slots=True)
class VllmNode:
    """One server process with its engine. core: the one that its model computes on."""

    name: str
    environment: Path
    model: Path
    core: int
    log: Path
    port: int = field(default_factory=free_port)
    side_port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        command = [str(self.environment / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(self.model), "--served-model-name", NAME, "--host", "127.0.0.1"]
        command += ["--port", str(self.port), *SETTINGS, "--kv-transfer-config", json.dumps(CONNECTOR)]
        own = {
            "VLLM_CPU_OMP_THREADS_BIND": str(self.core),
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port),
            "VLLM_CPU_KVCACHE_SPACE": str(KV_GB),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env={**without_settings(), **own}, stdout=log, stderr=log, start_new_session=True
            )

    def wait_until_healthy(self) -> None:
        """Raises StartupError where it ends before, or is not healthy in time."""
        deadline_s = time.monotonic() + START_S
        while not self._is_healthy():
            if self.process is None or self.process.poll() is not None or time.monotonic() > deadline_s:
                raise StartupError(f"vLLM's {self.name} node did not start; its log ends with:\n{self._end_of_log()}")
            time.sleep(LOOK_S)
        self._pin()

    def _pin(self) -> None:
        """The model's threads: vLLM places them itself, and has both nodes' on one core of two. Its others may roam."""
        assert self.process is not None
        for pid in with_descendants(self.process.pid):
            if "Worker" in Path(f"/proc/{pid}/comm").read_text():
                for task in Path(f"/proc/{pid}/task").iterdir():
                    os.sched_setaffinity(int(task.name), {self.core})

    def kill(self) -> None:
        """Server and engine at once, as when a machine dies."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def post(self, body: Mapping[str, object], timeout_s: float = ANSWER_S) -> IO[bytes]:
        """The reply to a completion request, still to be read. Raises VllmFailed."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps({"model": NAME, "temperature": 0.0, **body}).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            reply: IO[bytes] = urllib.request.urlopen(request, timeout=timeout_s)
        except urllib.error.HTTPError as error:
            raise VllmFailed(f"HTTP {error.code}") from None
        except (urllib.error.URLError, OSError) as error:
            raise VllmFailed(_told(error)) from None
        return reply

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def _end_of_log(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]


@dataclass(slots=True)
class VllmPair:
    """A prefill and a decode node, and what stands before them."""

    prefill: VllmNode
    decode: VllmNode
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(MOST_STREAMS))

    async def hear(self, call: Call, is_enough: Callable[[int], bool] = lambda num_tokens: False) -> Heard:
        """One streamed answer, to its end or until so many tokens are enough. Raises VllmFailed."""
        work = self._threads.submit(self._hear, call, is_enough)
        return await asyncio.wrap_future(work)

    def _hear(self, call: Call, is_enough: Callable[[int], bool]) -> Heard:
        called_s = time.monotonic()
        transfer = self.prefilled(call.prompt)
        token_ids: list[int] = []
        arrivals_s: list[float] = []
        for new in self.decoded(call.prompt, transfer, call.num_output_tokens):
            token_ids += new
            arrivals_s += [time.monotonic()] * len(new)
            if is_enough(len(token_ids)):
                break
        return Heard(call.number, called_s, tuple(arrivals_s), tuple(token_ids))

    def prefilled(self, prompt: Sequence[int]) -> Mapping[str, object]:
        """What the decode node needs in order to pull this prompt's KV."""
        with self.prefill.post(
            {"prompt": list(prompt), "max_tokens": 1, "kv_transfer_params": ASK_REMOTE_DECODE}
        ) as reply:
            transfer: Mapping[str, object] = json.load(reply)["kv_transfer_params"]
        return transfer

    def decoded(
        self, prompt: Sequence[int], transfer: Mapping[str, object], num_tokens: int, timeout_s: float = ANSWER_S
    ) -> Iterator[list[int]]:
        """The answer's tokens as they come. Raises VllmFailed where the stream ends with an error, or early."""
        body = {"prompt": list(prompt), "max_tokens": num_tokens, "kv_transfer_params": transfer}
        num_seen = 0
        with self.decode.post(
            {**body, "stream": True, "ignore_eos": True, "return_token_ids": True}, timeout_s
        ) as reply:
            for event in _events(reply):
                if "error" in event:
                    raise VllmFailed(f"an error in the stream: {event['error']}")
                for choice in event["choices"]:
                    num_seen += len(choice.get("token_ids") or [])
                    yield choice.get("token_ids") or []
        if num_seen < num_tokens:
            raise VllmFailed(f"the stream ended after {num_seen} of {num_tokens} tokens")

    def end(self) -> None:
        for node in (self.prefill, self.decode):
            node.kill()
        self._threads.shutdown(cancel_futures=True)


@contextlib.contextmanager
def vllm_pair(environment: Path, model: Path, folder: Path, progress: Progress) -> Iterator[VllmPair]:
    """Both nodes up, a core each, until the block ends."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    names = ("prefill", "decode")
    nodes = [
        VllmNode(name, environment, model, core, folder / f"vllm-{name}.log")
        for name, core in zip(names, (cores[0], cores[-1]), strict=True)
    ]
    pair = VllmPair(nodes[0], nodes[1])
    try:
        for number, node in enumerate(nodes):
            progress("starting vLLM", number, len(nodes))
            node.begin()
        for node in nodes:
            node.wait_until_healthy()
        progress("starting vLLM", len(nodes), len(nodes))
        yield pair
    finally:
        pair.end()


def _events(reply: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Of a stream of server-sent events."""
    try:
        for line in reply:
            text = line.decode().removeprefix("data:").strip()
            if text and text != "[DONE]":
                yield json.loads(text)
    except OSError as error:
        raise VllmFailed(_told(error)) from None


def _told(error: OSError) -> str:
    reason = getattr(error, "reason", None) or error
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__

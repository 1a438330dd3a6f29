"""vLLM in an environment of its own: one server, or a prefill and a decode node over NIXL with a core each.

Written against vLLM 0.32's documentation of disaggregated prefill: a request goes to the prefill node for one token,
and then, with the kv_transfer_params of that answer, to the decode node, which pulls the KV and streams the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.bench.listening import Call, Heard
from pdserve.bench.peers.http_server import (
    ANSWER_S,
    MOST_STREAMS,
    Completions,
    CompletionServer,
    HttpServer,
    listen,
    serving,
    to_the_end,
)
from pdserve.bench.processes import with_descendants
from pdserve.config.ports import free_port
from pdserve.model.progress import Progress

KV_GB = 4
NAME = "model"
PATH = "/v1/completions"
UNKNOWN_YET = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
ASK_REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False, **dict.fromkeys(UNKNOWN_YET)}
CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
SETTINGS = ("--max-model-len", "8192", "--no-enable-prefix-caching")
# Of the pair: that is how its documentation starts it.
EAGER = ("--dtype", "float32", "--enforce-eager")


def _asked(prompt: Sequence[int], num_tokens: int) -> dict[str, object]:
    return {"model": NAME, "temperature": 0.0, "prompt": list(prompt), "max_tokens": num_tokens}


def _body(prompt: Sequence[int], num_tokens: int) -> Mapping[str, object]:
    return {**_asked(prompt, num_tokens), "stream": True, "ignore_eos": True, "return_token_ids": True}


def _tokens(event: Mapping[str, Any]) -> list[int]:
    return [token for choice in event["choices"] for token in choice.get("token_ids") or []]


COMPLETIONS = Completions(PATH, _body, _tokens)


def vllm_server(environment: Path, model: Path, dtype: str, folder: Path) -> AbstractContextManager[CompletionServer]:
    """One server that does both, on all cores, compiled as is its default, until the block ends."""
    cores = sorted(os.sched_getaffinity(0))
    more = ("--dtype", dtype)
    return serving(_server("vLLM", environment, model, cores, folder / "vllm.log", more), COMPLETIONS)


def _server(
    name: str,
    environment: Path,
    model: Path,
    cores: Sequence[int],
    log: Path,
    more: Sequence[str] = (),
    more_environment: Mapping[str, str] | None = None,
) -> HttpServer:
    """cores: that its model computes on, a thread each."""
    port = free_port()
    command = [str(environment / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)]
    own = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GB),
        "OMP_NUM_THREADS": str(len(cores)),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    return HttpServer(name, [*command, *SETTINGS, *more], port, log, {**own, **(more_environment or {})})


def _node(name: str, environment: Path, model: Path, core: int, folder: Path) -> HttpServer:
    """One of a pair, with its model on one core."""
    more = (*EAGER, "--kv-transfer-config", json.dumps(CONNECTOR))
    side_channel = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    log = folder / f"vllm-{name}.log"
    node = _server(f"vLLM's {name} node", environment, model, [core], log, more, side_channel)
    return dataclasses.replace(node, when_healthy=lambda pid: _pin(pid, core))


def _pin(pid: int, core: int) -> None:
    """The model's threads: vLLM places them itself, and has both nodes' on one core of two. Its others may roam."""
    for process in with_descendants(pid):
        if "Worker" in Path(f"/proc/{process}/comm").read_text():
            for task in Path(f"/proc/{process}/task").iterdir():
                os.sched_setaffinity(int(task.name), {core})


@dataclass(slots=True)
class VllmPair:
    """A prefill and a decode node, and what stands before them."""

    prefill: HttpServer
    decode: HttpServer
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(MOST_STREAMS))

    async def hear(self, call: Call, is_enough: Callable[[int], bool] = to_the_end) -> Heard:
        """One streamed answer, to its end or until so many tokens are enough. Raises ServerFailed."""
        return await asyncio.wrap_future(self._threads.submit(listen, call, self._both_steps(call), is_enough))

    def _both_steps(self, call: Call) -> Iterator[list[int]]:
        yield from self.decoded(call.prompt, self.prefilled(call.prompt), call.num_output_tokens)

    def prefilled(self, prompt: Sequence[int]) -> Mapping[str, object]:
        """What the decode node needs in order to pull this prompt's KV."""
        with self.prefill.post(PATH, {**_asked(prompt, 1), "kv_transfer_params": ASK_REMOTE_DECODE}) as reply:
            transfer: Mapping[str, object] = json.load(reply)["kv_transfer_params"]
        return transfer

    def decoded(
        self, prompt: Sequence[int], transfer: Mapping[str, object], num_tokens: int, timeout_s: float = ANSWER_S
    ) -> Iterator[list[int]]:
        """The answer's tokens as they come. Raises ServerFailed where the stream ends with an error, or early."""
        return COMPLETIONS.stream(self.decode, prompt, num_tokens, {"kv_transfer_params": transfer}, timeout_s)

    def end(self) -> None:
        for node in (self.prefill, self.decode):
            node.kill()
        self._threads.shutdown(cancel_futures=True)


@contextlib.contextmanager
def vllm_pair(environment: Path, model: Path, folder: Path, progress: Progress) -> Iterator[VllmPair]:
    """Both nodes up, a core each, until the block ends."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    prefill = _node("prefill", environment, model, cores[0], folder)
    decode = _node("decode", environment, model, cores[-1], folder)
    pair = VllmPair(prefill, decode)
    nodes = (prefill, decode)
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

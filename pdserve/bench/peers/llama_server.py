"""llama.cpp's own server (llama-server), on the embedded model's GGUF."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from pdserve.bench.peers.http_server import Completions, CompletionServer, HttpServer, serving
from pdserve.config.environment import num_cores
from pdserve.config.ports import free_port


def _body(prompt: Sequence[int], num_tokens: int) -> Mapping[str, object]:
    return {
        "prompt": list(prompt),
        "n_predict": num_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "cache_prompt": False,
        "stream": True,
    }


def _tokens(event: Mapping[str, Any]) -> list[int]:
    return list(event.get("tokens") or [])


COMPLETIONS = Completions("/completion", _body, _tokens)


def llama_server(
    binaries: Path, gguf: Path, folder: Path, num_slots: int, slot_tokens: int
) -> AbstractContextManager[CompletionServer]:
    """It serves until the block ends, on all cores. num_slots: streams at once, of at most slot_tokens each."""
    port, threads = free_port(), str(num_cores())
    command = [str(binaries / "llama-server"), "--model", str(gguf), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--parallel", str(num_slots), "--ctx-size", str(num_slots * slot_tokens), "--no-webui"]
    command += ["--threads", threads, "--threads-batch", threads]
    return serving(HttpServer("llama-server", command, port, folder / "llama-server.log"), COMPLETIONS)

"""pdserve: the engine alone, one fused node, and a prefill with a decode node."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from pdserve import __version__
from pdserve.bench.deployed import Deployed, fused, pair
from pdserve.bench.speed.children import running_child
from pdserve.bench.speed.engines import Answering, Engine, Running, Setting, warmed
from pdserve.config import Quantization

DEPLOYMENTS: dict[str, Callable[..., AbstractContextManager[Deployed]]] = {"fused": fused, "pair": pair}


def engine_alone(setting: Setting, quantization: Quantization) -> Engine:
    """In a process of its own, without a front, a channel or a wire."""
    command = [sys.executable, "-m", "pdserve.bench.speed.engine_child", str(setting.model.directory)]
    command += ["--quantization", quantization, "--threads", str(setting.num_threads)]
    command += ["--max-tokens", str(setting.most_tokens), "--max-num-seqs", str(setting.most_streams)]

    def start() -> AbstractContextManager[Running]:
        return warmed(running_child(command, setting.folder / "engine.log"), setting.model.text)

    return Engine("engine", quantization, __version__, start)


def deployment(setting: Setting, name: str, quantization: Quantization) -> Engine:
    """Real nodes, asked over gRPC. name: of DEPLOYMENTS."""

    @contextlib.contextmanager
    def start() -> Iterator[Answering]:
        settings = {"quantization": quantization, "max_num_seqs": setting.most_streams}
        with DEPLOYMENTS[name](setting.model, **settings) as node:
            yield Answering(node.hear_all)

    return Engine(name, quantization, __version__, start, is_over_grpc=True)

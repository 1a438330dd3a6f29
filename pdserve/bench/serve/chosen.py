"""The servers and the loads that the command line names."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pdserve.bench.peers.installed import llama_binaries, llama_gguf
from pdserve.bench.peers.llama_server import llama_server
from pdserve.bench.peers.vllm import vllm_server
from pdserve.bench.policy_runs import Model
from pdserve.bench.serve.command import LLAMA, OURS, SECONDS, VLLM, chosen_streams
from pdserve.bench.serve.loads import ClosedLoad, Limit, Load, LongPromptLoad, Material, PoissonLoad, TraceLoad
from pdserve.bench.serve.servers import NUM_SLOTS, Kind, deployed, http_peer
from pdserve.model.model_config import read_config
from pdserve.sim.arrivals import Shape


def chosen_loads(arguments: argparse.Namespace, text: Sequence[int]) -> list[Load]:
    """text: the tokens that prompts are drawn from. Raises StartupError for a trace that is none."""
    shape = Shape(arguments.prompt_tokens, arguments.output_tokens)
    material = Material(text, shape, arguments.seed, arguments.timeout_s)
    is_bounded = arguments.seconds is not None or arguments.requests is not None
    limit = Limit(arguments.seconds if is_bounded else SECONDS, arguments.requests)
    streams = chosen_streams(arguments)
    loads: list[Load] = [ClosedLoad(num_streams, material, limit) for num_streams in streams]
    if arguments.long_prompt is not None:
        loads += [LongPromptLoad(num_streams, arguments.long_prompt, material) for num_streams in streams]
    loads += [PoissonLoad(rate_per_s, material, limit) for rate_per_s in dict.fromkeys(arguments.rate)]
    if arguments.trace is not None:
        trace = TraceLoad(Path(arguments.trace), arguments.rate_scale, arguments.length_scale, material, limit)
        trace.calls(0)  # what is wrong with the file is told before anything is started
        loads.append(trace)
    return loads


def chosen_kinds(arguments: argparse.Namespace, model: Model) -> list[Kind]:
    """Each of ours with each form of the weights, then the others."""
    names = list(dict.fromkeys(arguments.servers or OURS))
    num_streams = max(chosen_streams(arguments), default=0) + (arguments.long_prompt is not None)
    settings = dict(arguments.set)
    kinds = [
        deployed(name, quantization, model, num_streams, settings if name == "fused" else {})
        for name in names
        if name in OURS
        for quantization in dict.fromkeys(arguments.quantization or ["auto"])
    ]
    return kinds + [_peer(name, Path(arguments.peers), model, num_streams) for name in names if name not in OURS]


def _peer(name: str, peers: Path, model: Model, num_streams: int) -> Kind:
    if name in VLLM:
        environment = (peers / "vllm").absolute()
        return http_peer(name, model, partial(vllm_server, environment, model.directory, VLLM[name]))
    assert name == LLAMA, name
    most_tokens = read_config(model.directory).max_position_embeddings
    return http_peer(
        name,
        model,
        lambda folder: llama_server(
            llama_binaries(peers), llama_gguf(peers), folder, max(NUM_SLOTS, num_streams), most_tokens
        ),
    )

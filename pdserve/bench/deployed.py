"""A fused node, or a prefill and a decode node, that serve for as long as a measurement lasts."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from pdserve.bench.asking import EXACT
from pdserve.bench.listening import Call, Heard, hear_all, unique_prompt
from pdserve.bench.policy_runs import Model
from pdserve.bench.streams import running
from pdserve.client import Client
from pdserve.config import Role, ServerArgs
from pdserve.config.ports import free_port
from pdserve.request import RankLoad

# Unique prompts of short lengths, asked before anything counts: kernels, allocator and connections are warm then.
WARM_UP_LENGTHS = (300, 64, 16)
WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Deployed:
    """What answers at `address`. block_size: tokens of its KV blocks; chunk: most tokens of a round."""

    address: str
    block_size: int
    chunk: int

    def hear_all(self, calls: Sequence[Call]) -> list[Heard]:
        """See listening.hear_all; returns when every answer has ended."""
        return asyncio.run(hear_all(self.address, calls))

    def load(self) -> RankLoad:
        """Of the only rank."""
        (load,) = self.loads()
        return load

    def loads(self) -> tuple[RankLoad, ...]:
        """Of each data-parallel rank."""
        with Client(self.address, timeout_s=30.0) as client:
            return client.loads()


@contextlib.contextmanager
def fused(model: Model, **settings: Any) -> Iterator[Deployed]:
    """One node with all cores."""
    args = _args(model, **settings)
    with running([args], {}):
        yield _warm(args, model)


@contextlib.contextmanager
def pair(model: Model, **settings: Any) -> Iterator[Deployed]:
    """Two nodes of one thread, each on a core of its own where there are two: neither is ever in the other's way."""
    prefill = _args(model, role=Role.PREFILL, num_threads=1, **settings)
    peers = (prefill.address,)
    decode = _args(model, role=Role.DECODE, num_threads=1, prefill_peers=peers, **settings)
    with running([prefill, decode], {}, _a_core_each()):
        yield _warm(decode, model)


def _a_core_each() -> list[list[int]]:
    cores = sorted(os.sched_getaffinity(0))
    return [[core] for core in cores[:2]] if len(cores) > 1 else []


def _args(model: Model, **settings: Any) -> ServerArgs:
    """Weights as float32 unless the settings say otherwise: the costs and the engines compared with are of those."""
    chosen = {**EXACT, **settings}
    args = ServerArgs(model=str(model.directory), port=free_port(), drain_timeout_s=1.0, **chosen)
    args.validate()
    return args


def _warm(args: ServerArgs, model: Model) -> Deployed:
    node = Deployed(args.address, args.block_size, args.chunked_prefill_size)
    for length in WARM_UP_LENGTHS:
        node.hear_all([Call(0, unique_prompt(model.text, length, f"warm-up {length}"), WARM_UP_TOKENS)])
    return node

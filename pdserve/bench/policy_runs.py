"""What the policy measurements share: the model and its text, fused nodes, and what one measurement comes to."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from pdserve.bench.asking import EXACT, Verdict
from pdserve.bench.stream_checks import Check, exactly
from pdserve.bench.streams import running
from pdserve.bench.workload import Ask
from pdserve.client import Client
from pdserve.config import ServerArgs
from pdserve.config.ports import free_port
from pdserve.demo_prompts import diary
from pdserve.engine.tokenizer import HfTokenizer
from pdserve.errors import InternalError
from pdserve.model.model_config import read_config
from pdserve.node_process import NodeProcess
from pdserve.request import RankLoad

PATIENCE_S = 120.0
POLL_S = 0.1
# Share of greedy answers that rounding may decide, as of all of them.
MAX_TIED_SHARE = 0.05

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One measurement: figures by case, under stable names with units, and what has to hold."""

    title: str
    cases: Mapping[str, Figures]
    checks: list[Check]


@dataclass(frozen=True, slots=True)
class Model:
    """What is served: a directory, and prompts made of its tokens."""

    directory: Path
    text: tuple[int, ...]

    @classmethod
    def of(cls, directory: Path) -> Model:
        return cls(directory, tuple(HfTokenizer(directory).encode(diary())))

    def prompt(self, num_tokens: int, random: Random) -> tuple[int, ...]:
        """A piece of the text that begins anywhere and starts over at its end."""
        offset = random.randrange(len(self.text))
        times = math.ceil((offset + num_tokens) / len(self.text))
        return (self.text * times)[offset : offset + num_tokens]

    def asks(self, lengths: list[int], max_new_tokens: int, random: Random, first: int = 0) -> list[Ask]:
        """One request a length, numbered from `first`."""
        return [
            Ask(number, self.prompt(length, random), max_new_tokens, None)
            for number, length in enumerate(lengths, first)
        ]

    def block_bytes(self, block_size: int) -> int:
        return read_config(self.directory).kv_layout(block_size).block_bytes


@dataclass(frozen=True, slots=True)
class FusedNode:
    """A fused node that serves."""

    args: ServerArgs
    process: NodeProcess

    @property
    def address(self) -> str:
        return self.args.address

    def client(self) -> Client:
        """One attempt a call: nothing is asked twice behind our back."""
        return Client(self.address, timeout_s=PATIENCE_S * 5, max_attempts=1)

    def load(self) -> RankLoad:
        """With every table of the rank checked."""
        with self.client() as client:
            (load,) = client.loads(check_integrity=True)
        return load

    def wait_for(self, what: str, is_so: Callable[[RankLoad], bool]) -> RankLoad:
        """The first load of which it is so. Raises InternalError when none is."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_so(load := self.load()):
            if time.monotonic() > deadline_s:
                raise InternalError(f"{what}: not within {PATIENCE_S:g} s; {load}")
            time.sleep(POLL_S)
        return load

    def until_quiet(self) -> RankLoad:
        """Its load once no request holds anything."""

        def is_quiet(load: RankLoad) -> bool:
            return not (load.num_running or load.num_waiting or load.num_held_blocks)

        return self.wait_for("a node without requests gives everything back", is_quiet)


@contextlib.contextmanager
def fused_node(model: Model, **settings: Any) -> Iterator[FusedNode]:
    """A fused node of these settings, for as long as the block."""
    args = ServerArgs(model=str(model.directory), port=free_port(), drain_timeout_s=1.0, **{**EXACT, **settings})
    args.validate()
    with running([args], {}) as (process,):
        yield FusedNode(args, process)


def equality_checks(judged: Mapping[int, Verdict]) -> list[Check]:
    """No answer differs; few are decided by rounding."""
    verdicts = list(judged.values())
    return [
        exactly("answers that differ", verdicts.count(Verdict.DIFFERENT), 0),
        Check("answers tied", verdicts.count(Verdict.TIED), 0, math.ceil(MAX_TIED_SHARE * len(verdicts))),
    ]

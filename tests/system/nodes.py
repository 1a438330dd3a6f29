"""Real nodes for tests: started together, asked through the SDK or over a raw channel, killed, and always ended."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pdserve.bench.processes import children, is_running
from pdserve.client import Answer, Client
from pdserve.config import Role, ServerArgs
from pdserve.config.ports import free_port
from pdserve.node_process import NodeProcess
from pdserve.request import RankLoad

BLOCK_SIZE = 16
CHUNK = 64
# Much longer than anything here takes; what is waited for comes or the test has failed.
PATIENCE_S = 60.0
TINY: dict[str, Any] = {
    "num_threads": 1,
    "block_size": BLOCK_SIZE,
    "chunked_prefill_size": CHUNK,
    "num_kv_blocks": 2048,
    "max_num_seqs": 8,
    # transformers is asked for the same tokens.
    "quantization": "fp32",
}


class Node:
    """One node process and its log."""

    def __init__(self, args: ServerArgs, log: Path, ucx_tls: str | None, inside: Sequence[str] = ()) -> None:
        self.args = args
        self.ucx_tls = ucx_tls
        self._log = log
        with log.open("wb") as file:
            self.process = NodeProcess(args, file, {"UCX_TLS": ucx_tls} if ucx_tls else {}, inside=inside)

    @property
    def address(self) -> str:
        return self.args.address

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def rank_pid(self) -> int:
        (pid,) = children(self.process.pid)
        return pid

    def client(self) -> Client:
        """One attempt a call: what the node says is what the test sees."""
        return Client(self.address, timeout_s=PATIENCE_S, max_attempts=1)

    def ask(self, prompt: Sequence[int], max_new_tokens: int = 8, **options: Any) -> Answer:
        """A greedy answer."""
        with self.client() as client:
            return client.generate(token_ids=prompt, max_new_tokens=max_new_tokens, temperature=0.0, **options)

    def loads(self) -> list[RankLoad]:
        """Of every rank, with every table of it checked."""
        with self.client() as client:
            return client.loads(check_integrity=True)

    def load(self) -> RankLoad:
        """Of the only rank."""
        (load,) = self.loads()
        return load

    def wait_until_quiet(self) -> None:
        """Nothing is held, leased, quarantined or on the wire."""

        def held() -> list[dict[str, int]]:
            return [in_use(load) for load in self.loads()]

        wait_for(lambda: not any(held()), lambda: f"{self.process.name} holds {held()}:\n{self.log}")

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)

    def wait_until_ended(self) -> int:
        """Its exit status."""
        wait_for(lambda: self.process.has_ended, lambda: f"{self.process.name} is still running:\n{self.log}")
        status = self.process.exit_status
        assert status is not None
        return status


class Nodes:
    """Starts nodes and ends them all."""

    def __init__(self, model: str, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._numbers = itertools.count()
        self._nodes: list[Node] = []

    def begin(self, role: Role, *, ucx_tls: str | None = None, inside: Sequence[str] = (), **settings: Any) -> Node:
        """A node that is on its way up. inside: see NodeProcess."""
        settings = {"model": self._model, "port": free_port(), "drain_timeout_s": PATIENCE_S, **TINY, **settings}
        args = ServerArgs(role=role, **settings)
        args.validate()
        log = self._folder / f"{next(self._numbers)}-{role}.log"
        node = Node(args, log, ucx_tls, inside)
        self._nodes.append(node)
        return node

    def start(self, role: Role, **settings: Any) -> Node:
        """A node that serves."""
        node = self.begin(role, **settings)
        wait_until_serving(node)
        return node

    def start_pair(self, **settings: Any) -> tuple[Node, Node]:
        """A prefill node and a decode node that has found it."""
        prefill = self.begin(Role.PREFILL, **settings)
        decode = self.begin(Role.DECODE, prefill_peers=(prefill.address,), **settings)
        for node in (prefill, decode):
            wait_until_serving(node)
        wait_until_connected(decode)
        return prefill, decode

    def end(self) -> None:
        for node in self._nodes:
            for _ in range(2):
                node.process.ask_to_stop()
        for node in self._nodes:
            node.process.end()


def wait_until_serving(node: Node) -> None:
    def is_settled() -> bool:
        return node.process.has_ended or node.process.is_serving()

    wait_for(is_settled, lambda: node.log)
    assert not node.process.has_ended, node.log


def wait_until_connected(decode: Node) -> None:
    """Prompts are prefilled by its peers from now on."""
    wait_for(decode.process.has_its_peers, lambda: decode.log)


def wait_for(is_so: Callable[[], bool], told: Callable[[], str], poll_s: float = 0.1) -> None:
    """Returns when `is_so`; fails with what is `told` when it never is. Each look costs the nodes some of a core."""
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, told()
        time.sleep(poll_s)


def wait_until_gone(pid: int) -> None:
    wait_for(lambda: not is_running(pid), lambda: f"process {pid} is still running")


def in_use(load: RankLoad) -> dict[str, int]:
    """What is not given back, by name; empty when the rank is quiet."""
    counts = {
        "running": load.num_running,
        "waiting": load.num_waiting,
        "held_blocks": load.num_held_blocks,
        "quarantined_blocks": load.num_quarantined_blocks,
        "leases": load.num_live_leases,
        "transfers": load.num_open_transfers,
        "open_pulls": load.counters.get("open_pulls", 0),
        "open_reads": load.counters.get("open_reads", 0),
    }
    return {name: count for name, count in counts.items() if count}

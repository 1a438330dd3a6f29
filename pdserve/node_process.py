"""Nodes as child processes of this one: started, waited for, and ended together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import FrameType
from typing import IO

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.client import Client
from pdserve.config import MODULES, Role, ServerArgs
from pdserve.config.environment import without_settings
from pdserve.config.peer_address import file_path
from pdserve.errors import PdserveError, StartupError

POLL_S = 0.2
# Asks the kernel for SIGTERM when its parent dies, however it dies (prctl, PR_SET_PDEATHSIG), and becomes the node.
ENDS_WITH_US = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 15); os.execv(sys.executable, sys.argv[1:])"
# Before that, in the same child: it and all its children stay on these cores.
STAYS_ON = "import os; os.sched_setaffinity(0, {cores}); "
# What a node gets beyond its drain, first to end in order and then to end at once.
ENDING_S = 15.0


def program(role: Role, words: Sequence[str]) -> list[str]:
    """The command that is a node. Python heeds no -X it doesn't know: with it `pgrep -f pdserve` finds the node."""
    return [sys.executable, "-X", "pdserve", "-m", MODULES[role], *words]


class NodeProcess:
    """One node in a process (group) of its own, so that a Ctrl-C reaches it only through us."""

    def __init__(
        self,
        args: ServerArgs,
        log: IO[bytes] | None = None,
        environment: Mapping[str, str] | None = None,
        cores: Collection[int] = (),
        inside: Sequence[str] = (),
    ) -> None:
        """args: settings with a port of their own. log: where its output goes; None = where ours goes.

        environment: what it gets beside our variables, such as UCX_TLS. cores: the only ones it runs on, all where
        none is named; they must be ours. inside: a command that runs another one, such as `ip netns exec NAME`.
        """
        self.args = args
        node = program(args.role, args.command_line())
        prelude = STAYS_ON.format(cores=set(cores)) if cores else ""
        self._process = subprocess.Popen(
            [*inside, sys.executable, "-c", prelude + ENDS_WITH_US, *node],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**without_settings(), **(environment or {})},
            start_new_session=True,
        )

    @property
    def name(self) -> str:
        return f"{self.args.role} node on {self.args.address}"

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def exit_status(self) -> int | None:
        """As of Popen: negative for a signal; None while it runs."""
        return self._process.poll()

    def is_serving(self) -> bool:
        """Whether its health service says SERVING."""
        with grpc.insecure_channel(self.args.address) as channel:
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1.0)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def has_its_peers(self) -> bool:
        """Whether it can read the memory of each of its prefill nodes; until then it would compute prompts itself."""
        if not self.args.prefill_peers:
            return True
        with Client(self.args.address, timeout_s=5.0) as client:
            try:
                loads = client.loads()
            except PdserveError:  # it may end at any moment, which is seen and told elsewhere
                return False
        known = sum(load.counters.get("num_peers", 0) for load in loads)
        ready = sum(load.counters.get("num_ready_peers", 0) for load in loads)
        # A name or a file stands for as many nodes as it tells of by now.
        return ready == known and (known > 0 or any(file_path(peer) for peer in self.args.prefill_peers))

    def ask_to_stop(self) -> None:
        """SIGTERM: the first drains, a second ends at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Stop it, whatever it takes; returns when it and its children are gone."""
        try:
            for patience_s in (self.args.drain_timeout_s + ENDING_S, ENDING_S):
                self.ask_to_stop()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(patience_s)
                    break
        finally:
            # The rank processes share its group: none may outlive it, nor an impatient second Ctrl-C.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


def wait_until_ready(nodes: Sequence[NodeProcess], on_ready: Callable[[NodeProcess], None]) -> None:
    """Returns when every node serves and is connected to its peers; calls on_ready for each as it does.

    Raises StartupError when one ends before, or isn't ready within its own start-up timeout.
    """
    waiting = list(nodes)
    deadlines = {node.name: time.monotonic() + node.args.startup_timeout_s for node in nodes}
    while waiting:
        for node in list(waiting):
            if node.has_ended:
                raise StartupError(f"the {node.name} ended while starting (status {node.exit_status}); see its output")
            if time.monotonic() > deadlines[node.name]:
                limit = f"{node.args.startup_timeout_s:g} s"
                raise StartupError(f"the {node.name} isn't ready after {limit}; raise --startup-timeout-s")
            if node.is_serving() and node.has_its_peers():
                waiting.remove(node)
                on_ready(node)
        time.sleep(POLL_S)


@contextlib.contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """SIGTERM leaves the block as Ctrl-C does, so that what is to be ended is.

    It becomes a SIGINT, for an event loop has a way of its own to be left by one: an exception in the middle of a task
    would be told as one that nobody retrieved.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as for a job in the background
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)

"""What the threads of a rank are built on in tests: its size, a runner and a transport that tell what they do."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.engine.tiers import StorageLink
from pdserve.kv.layout import LAYOUT_VERSION, Fingerprint, KVLayout
from pdserve.kv.storage import KVStorage
from pdserve.model.runner import ModelRunner, RoundResult
from pdserve.request import TokenRequest
from pdserve.rpc.fake import EOS
from pdserve.scheduler.config import CadenceLimits
from pdserve.scheduler.plan import RoundPlan, SlotStart
from pdserve.transfer.base import Command, TransportEvent
from pdserve.transfer.loopback import LoopbackTransport
from tests.roles.journal import LIMIT_S, Journal

VOCAB_SIZE = 258
BANNED = (EOS,)
BLOCK_SIZE = 64
CHUNK = 128
LAYOUT = KVLayout(num_layers=2, num_kv_heads=4, head_dim=2, block_size=BLOCK_SIZE)

Holds = Callable[[RoundPlan], bool]
# The storage below a host slab, started.
OpenStorage = Callable[[KVStorage], StorageLink]


@dataclass(frozen=True, slots=True)
class Started:
    """A request got its first row."""

    node: str
    start: SlotStart
    request: TokenRequest


@dataclass(frozen=True, slots=True)
class Held:
    """A forward waits for the test."""

    node: str
    plan: RoundPlan


@dataclass(frozen=True, slots=True)
class Computed:
    """A forward is done."""

    node: str
    plan: RoundPlan


@dataclass(frozen=True, slots=True)
class Seen:
    """The transport thread saw it."""

    node: str
    event: TransportEvent
    kind: type[TransportEvent]


class HeldRunner:
    """A runner whose forwards the test may hold."""

    def __init__(self, name: str, runner: ModelRunner, journal: Journal) -> None:
        self._name = name
        self._runner = runner
        self._journal = journal
        self._holds: Holds = lambda _: False
        self._go = threading.Event()

    def hold(self, holds: Holds = lambda _: True) -> None:
        """From now on, forwards that `holds` says yes to wait for `release`."""
        self._go.clear()
        self._holds = holds

    def release(self) -> None:
        self._holds = lambda _: False
        self._go.set()

    def start(self, start: SlotStart, request: TokenRequest) -> None:
        self._journal.note(Started(self._name, start, request))
        self._runner.start(start, request)

    def execute(self, plan: RoundPlan) -> RoundResult:
        if self._holds(plan):
            self._journal.note(Held(self._name, plan))
            assert self._go.wait(LIMIT_S), f"a forward of {self._name} was held and never released"
        result = self._runner.execute(plan)
        self._journal.note(Computed(self._name, plan))
        return result

    def idle(self) -> None:
        self._runner.idle()


class WatchedTransport:
    """A loopback transport whose events are written down."""

    def __init__(self, name: str, transport: LoopbackTransport, journal: Journal) -> None:
        self._name = name
        self._transport = transport
        self._journal = journal

    def metadata(self) -> bytes:
        return self._transport.metadata()

    def submit(self, command: Command) -> None:
        self._transport.submit(command)

    def events(self) -> list[TransportEvent]:
        events = self._transport.events()
        for event in events:
            self._journal.note(Seen(self._name, event, type(event)))
        return events

    @property
    def num_open_reads(self) -> int:
        return self._transport.num_open_reads

    def close(self) -> None:
        self._transport.close()


@dataclass(frozen=True, slots=True)
class Size:
    """What a rank is given. gate: its intervals A and N, and after how many prefill rounds in a row it closes.

    num_parts: its processes. num_ranks: of its node. lag_seed: of how late the processes that do not lead run, if so.
    """

    num_blocks: int = 64
    num_slots: int = 8
    max_model_len: int = 2048
    chunk: int = CHUNK
    answer_headroom: int = 1024
    lease_s: float = 30.0
    quarantine_s: float = 120.0
    connect_timeout_s: float = 10.0
    max_outstanding_transfers: int | None = None
    model_revision: str = "r0"
    num_host_blocks: int = 0
    gate: tuple[int, int, int | None] | None = None
    cadence: CadenceLimits | None = None
    longest_chunk_s: float = 0.0
    has_checksums: bool = False
    has_sampler: bool = False
    num_parts: int = 1
    num_ranks: int = 1
    lag_seed: int | None = None


def fingerprint(model_revision: str, num_parts: int = 1) -> Fingerprint:
    return Fingerprint(
        layout_version=LAYOUT_VERSION,
        architecture="FakeForCausalLM",
        model_revision=model_revision,
        dtype=LAYOUT.dtype,
        block_size=BLOCK_SIZE,
        num_layers=LAYOUT.num_layers,
        num_kv_heads=LAYOUT.num_kv_heads,
        head_dim=LAYOUT.head_dim,
        vocab_size=VOCAB_SIZE,
        tensor_parallel_size=num_parts,
    )

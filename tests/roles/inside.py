"""The inside of a rank without its process: the real loop, its threads and its tiers, a fake model, loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.engine.channel import RankChannel
from pdserve.engine.messages import FromRank, FromTransport, Ready, ToRank, ToTransport
from pdserve.engine.rank import RankLoop
from pdserve.engine.tiers import HostTierLink, StorageLink
from pdserve.engine.transport_thread import TransportThread
from pdserve.kv.layout import LAYOUT_VERSION, Fingerprint, KVLayout
from pdserve.kv.storage import KVStorage
from pdserve.model.fake import FakeRunner
from pdserve.model.runner import RoundResult
from pdserve.request import TokenRequest
from pdserve.rpc.fake import EOS
from pdserve.scheduler.config import GATE_WATERMARK, CadenceLimits, SchedulerConfig
from pdserve.scheduler.gate import PrefillGate
from pdserve.scheduler.plan import RoundPlan, SlotStart
from pdserve.scheduler.scheduler import Scheduler
from pdserve.transfer.base import Command, TransportEvent
from pdserve.transfer.loopback import LoopbackNetwork, LoopbackTransport
from tests.roles.journal import LIMIT_S, Journal
from tests.roles.sampling_runner import SamplingRunner

VOCAB_SIZE = 258
BANNED = (EOS,)
BLOCK_SIZE = 64
CHUNK = 128
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=2, block_size=BLOCK_SIZE)

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
    """A FakeRunner whose forwards the test may hold."""

    def __init__(self, name: str, runner: FakeRunner, journal: Journal) -> None:
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
    """What a rank is given. gate: its intervals A and N, and after how many prefill rounds in a row it closes."""

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


@dataclass
class RankThread:
    """A rank's threads. name: unique on the network, another one for each life of a node."""

    name: str
    size: Size
    network: LoopbackNetwork
    journal: Journal
    loop_endpoint: str
    transport_endpoint: str
    has_transport: bool
    open_storage: OpenStorage | None = None
    runner: HeldRunner = field(init=False)
    loop: RankLoop = field(init=False)
    tiers: HostTierLink | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.storage = KVStorage(LAYOUT, self.size.num_blocks)
        # Slabs come with whatever the memory held; a test has to fail the same way each time.
        self.storage.slab.fill_(0xA5)
        self.runner = HeldRunner(self.name, self._fake(), self.journal)
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=self.size.num_blocks,
                block_size=BLOCK_SIZE,
                max_batch_size=self.size.num_slots,
                max_scheduled_tokens=self.size.chunk,
                max_model_len=self.size.max_model_len,
                answer_headroom=self.size.answer_headroom,
                max_outstanding_transfers=self.size.max_outstanding_transfers,
                prefill_watermark=GATE_WATERMARK if self.size.gate else None,
                cadence=self.size.cadence,
                num_host_blocks=self.size.num_host_blocks,
                has_storage=self.open_storage is not None,
            )
        )
        self._thread = threading.Thread(target=self._run, name=f"{self.name} loop", daemon=True)

    def _fake(self) -> FakeRunner:
        size = self.size
        if size.has_sampler:
            return SamplingRunner(self.storage, VOCAB_SIZE, size.num_slots, size.max_model_len, EOS)
        return FakeRunner(self.storage, VOCAB_SIZE, size.num_slots, size.max_model_len, BANNED)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), f"the loop of {self.name} goes on"

    def _run(self) -> None:
        front: RankChannel[ToRank, FromRank] = RankChannel(self.loop_endpoint, ToRank)
        transport = self._transport() if self.has_transport else None
        metadata = transport.start() if transport else b""
        self.tiers = self._tiers() if self.size.num_host_blocks else None
        gate = PrefillGate(*self.size.gate) if self.size.gate else None
        self.loop = RankLoop(
            self.scheduler, self.runner, front, (EOS,), transport, self.tiers, gate, warm_up_s=self.size.longest_chunk_s
        )
        front.send(
            Ready(
                num_blocks=self.size.num_blocks,
                block_bytes=LAYOUT.block_bytes,
                max_model_len=self.size.max_model_len,
                vocab_size=VOCAB_SIZE,
                eos_token_ids=(EOS,),
                fingerprint=fingerprint(self.size.model_revision),
                transport_metadata=metadata,
                longest_chunk_s=self.size.longest_chunk_s,
            )
        )
        try:
            self.loop.run()
        finally:
            if self.tiers is not None:
                self.tiers.close()
            if transport is not None:
                transport.close(timeout_s=1.0)
            front.close()

    def _tiers(self) -> HostTierLink:
        host = KVStorage(LAYOUT, self.size.num_host_blocks)
        host.slab.fill_(0x5A)
        return HostTierLink(self.storage, host, self.open_storage(host) if self.open_storage else None)

    def _transport(self) -> TransportThread:
        def open_transport() -> WatchedTransport:
            timeout_s = self.size.connect_timeout_s
            slab = self.storage.slab.numpy()
            transport = LoopbackTransport(self.network, self.name, slab, connect_timeout_s=timeout_s)
            return WatchedTransport(self.name, transport, self.journal)

        def open_channel() -> RankChannel[ToTransport, FromTransport]:
            return RankChannel(self.transport_endpoint, ToTransport)

        return TransportThread(
            open_transport,
            open_channel,
            block_size=BLOCK_SIZE,
            lease_s=self.size.lease_s,
            quarantine_s=self.size.quarantine_s,
            generation=self.scheduler.generation,
            hashed_slab=self.storage.slab.numpy() if self.size.has_checksums else None,
        )


def fingerprint(model_revision: str) -> Fingerprint:
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
    )

"""The threads of a rank without its processes: the real loops and transport threads, tiers, a fake model, loopback."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from pdserve.engine.channel import RankChannel
from pdserve.engine.following import FollowerLoop, Generations
from pdserve.engine.leading import Followers, LeadingLink, LeadingRunner
from pdserve.engine.messages import FromLeader, FromRank, FromTransport, Ready, ToLeader, ToRank, ToTransport
from pdserve.engine.rank import RankLoop
from pdserve.engine.tiers import HostTierLink
from pdserve.engine.transport_thread import TransportThread
from pdserve.kv.layout import held_heads
from pdserve.kv.storage import KVStorage
from pdserve.request import BlockId
from pdserve.rpc.fake import EOS
from pdserve.scheduler.config import GATE_WATERMARK, SchedulerConfig
from pdserve.scheduler.gate import PrefillGate
from pdserve.scheduler.scheduler import Scheduler
from pdserve.transfer.loopback import LoopbackNetwork, LoopbackTransport
from tests.roles.heads import Exchange, HeadsFollower, HeadsRunner
from tests.roles.inside import (
    BANNED,
    BLOCK_SIZE,
    LAYOUT,
    VOCAB_SIZE,
    HeldRunner,
    OpenStorage,
    Size,
    WatchedTransport,
    fingerprint,
)
from tests.roles.journal import LIMIT_S, Journal
from tests.roles.lagging import LaggingLink
from tests.roles.sampling_runner import SamplingRunner


@dataclass
class PartThread:
    """The threads of one process of a rank. name: unique on the network, another one for each life of a node.

    exchange: with its other processes. part: which of them it is.
    """

    name: str
    size: Size
    network: LoopbackNetwork
    journal: Journal
    loop_endpoint: str
    transport_endpoint: str
    has_transport: bool
    exchange: Exchange = field(default_factory=lambda: Exchange(1))
    part: int = 0
    transport: TransportThread | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.layout = LAYOUT.shard(self.size.num_parts)
        self.storage = KVStorage(self.layout, self.size.num_blocks)
        # Slabs come with whatever the memory held; a test has to fail the same way each time.
        self.storage.slab.fill_(0xA5)
        self._thread = threading.Thread(target=self._run, name=f"{self.name} loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive(), f"the loop of {self.name} goes on"

    def _run(self) -> None:
        raise NotImplementedError

    def _fake(self) -> HeadsRunner:
        size = self.size
        if size.has_sampler:
            return SamplingRunner(self.storage, VOCAB_SIZE, size.num_slots, size.max_model_len, EOS)
        first_head = held_heads(LAYOUT.num_kv_heads, size.num_parts, self.part).start
        return HeadsRunner(
            *(self.storage, VOCAB_SIZE, size.num_slots, size.max_model_len, BANNED),
            first_head=first_head,
            part=self.part,
            exchange=self.exchange,
        )

    def _ready(self, metadata: bytes) -> Ready:
        return Ready(
            num_blocks=self.size.num_blocks,
            block_bytes=self.layout.block_bytes,
            max_model_len=self.size.max_model_len,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            fingerprint=fingerprint(self.size.model_revision, self.size.num_parts),
            transport_metadata=metadata,
            longest_chunk_s=self.size.longest_chunk_s,
        )

    def _start_transport(self, generation: Callable[[BlockId], int]) -> bytes:
        """Returns what peers need to read from it; nothing where there is none."""
        if not self.has_transport:
            return b""

        def open_transport() -> WatchedTransport:
            timeout_s = self.size.connect_timeout_s
            slab = self.storage.slab.numpy()
            transport = LoopbackTransport(self.network, self.name, slab, connect_timeout_s=timeout_s)
            return WatchedTransport(self.name, transport, self.journal)

        def open_channel() -> RankChannel[ToTransport, FromTransport]:
            return RankChannel(self.transport_endpoint, ToTransport)

        self.transport = TransportThread(
            open_transport,
            open_channel,
            block_size=BLOCK_SIZE,
            lease_s=self.size.lease_s,
            quarantine_s=self.size.quarantine_s,
            generation=generation,
            hashed_slab=self.storage.slab.numpy() if self.size.has_checksums else None,
        )
        return self.transport.start()

    def _close_transport(self) -> None:
        if self.transport is not None:
            self.transport.close(timeout_s=1.0)


@dataclass
class RankThread(PartThread):
    """The process that schedules. step_endpoints: where each of the others hears what to compute. number: of its rank.

    has_ended: nothing is said to the others any more.
    """

    open_storage: OpenStorage | None = None
    step_endpoints: Sequence[str] = ()
    number: int = 0
    runner: HeldRunner = field(init=False)
    loop: RankLoop = field(init=False)
    link: LeadingLink | None = field(init=False, default=None)
    tiers: HostTierLink | None = field(init=False, default=None)
    has_ended: threading.Event = field(init=False, default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__post_init__()
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

    def _run(self) -> None:
        front: RankChannel[ToRank, FromRank] = RankChannel(self.loop_endpoint, ToRank)
        followers: Followers = [RankChannel(endpoint, ToLeader, binds=True) for endpoint in self.step_endpoints]
        metadata = self._start_transport(self.scheduler.generation)
        if self.transport is not None and followers:
            self.link = LeadingLink(self.transport, followers)
        self.tiers = self._tiers() if self.size.num_host_blocks else None
        self.loop = RankLoop(
            *(self.scheduler, LeadingRunner(self.runner, followers) if followers else self.runner, front, (EOS,)),
            transport=self.link or self.transport,
            tiers=self.tiers,
            gate=PrefillGate(*self.size.gate) if self.size.gate else None,
            rank=self.number,
            warm_up_s=self.size.longest_chunk_s,
        )
        front.send(self._ready(metadata))
        try:
            self.loop.run()
        finally:
            self.has_ended.set()
            if self.tiers is not None:
                self.tiers.close()
            self._close_transport()
            front.close()
            for follower in followers:
                follower.close()

    def _tiers(self) -> HostTierLink:
        host = KVStorage(self.layout, self.size.num_host_blocks)
        host.slab.fill_(0x5A)
        return HostTierLink(self.storage, host, self.open_storage(host) if self.open_storage else None)


@dataclass
class FollowerThread(PartThread):
    """leader: whose `step_endpoints` it is one of."""

    leader: RankThread = field(kw_only=True)
    link: LaggingLink | None = field(init=False, default=None)

    def _run(self) -> None:
        leader: RankChannel[FromLeader, ToLeader] = RankChannel(self.leader.step_endpoints[self.part - 1], FromLeader)
        front: RankChannel[ToRank, FromRank] = RankChannel(self.loop_endpoint, ToRank)
        generations = Generations()
        metadata = self._start_transport(generations)
        if self.transport is not None:
            self.link = LaggingLink(self.name, self.transport, self.journal, _lag(self.size.lag_seed, self.part))
        front.send(self._ready(metadata))
        try:
            FollowerLoop(HeadsFollower(self._fake()), leader, front, self.link, generations).run()
        finally:
            self._close_transport()
            # A leader must not wait for one that has left before it.
            assert self.leader.has_ended.wait(LIMIT_S), f"{self.leader.name} goes on without {self.name}"
            leader.close()
            front.close()
            if self.link is not None:
                self.link.close()


@dataclass(frozen=True)
class Inside:
    """The threads of one rank: of the process that leads it, and of the others."""

    leader: RankThread
    followers: Sequence[FollowerThread]

    @property
    def parts(self) -> list[PartThread]:
        return [self.leader, *self.followers]

    @property
    def num_half_told(self) -> int:
        """Events that the leader has not heard from every part, or that are on their way to it."""
        num_told = self.leader.link._quorum.num_open if self.leader.link is not None else 0
        return num_told + sum(follower.link.num_waiting for follower in self.followers if follower.link is not None)

    def count(self, counter: str) -> int:
        """A counter of the transports, over all parts."""
        return sum(part.transport.counters().get(counter, 0) for part in self.parts if part.transport is not None)

    def stop(self) -> None:
        """Nobody is held up any more."""
        self.leader.runner.release()
        self.leader.exchange.end()
        for follower in self.followers:
            if follower.link is not None:
                follower.link.release()

    def join(self) -> None:
        for part in self.parts:
            part.join()


def _lag(seed: int | None, part: int) -> Callable[[], int]:
    """Most things go on at once, some after a few polls, some after so many that rounds go by."""
    if seed is None:
        return lambda: 0
    chance = Random(f"{seed} {part}")
    return lambda: chance.choice((0, 0, chance.randrange(20), chance.randrange(300)))

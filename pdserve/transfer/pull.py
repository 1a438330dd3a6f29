"""The reading side of a handoff: which KV was announced, which reads are open, and when the whole may be committed.

    OPEN ──every rank covered, every read done──▶ COMPLETE ──confirmed──▶ COMMITTED
      └────── failed, abandoned, refused ─────────────┴────────▶ DRAINING ──every read quiet──▶ QUIET

Commit only what was announced without a gap, read to the last byte on every rank, and then confirmed by the peer as
pinned all the while; anything else is a failed transfer, whatever the bytes look like. Destination blocks belong to the
transfer until it is committed or quiet. (Spec: read, confirm, commit; quiet, and quarantine.) Pure; transport thread.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count

from pdserve.errors import InternalError, ProtocolError
from pdserve.request import BlockId, TransferId
from pdserve.transfer.base import PeerId, PeerLost, Read, ReadDone, ReadFailed, ReadId, ReadQuiet, TransportEvent


class PullState(enum.Enum):
    OPEN = "open"
    COMPLETE = "complete"
    COMMITTED = "committed"
    DRAINING = "draining"
    QUIET = "quiet"


class PullStep(enum.Enum):
    READ_ALL = "read_all"
    CONFIRM = "confirm"
    FAIL = "fail"
    FALL_QUIET = "fall_quiet"


TRANSITIONS: dict[tuple[PullState, PullStep], PullState] = {
    (PullState.OPEN, PullStep.READ_ALL): PullState.COMPLETE,
    (PullState.OPEN, PullStep.FAIL): PullState.DRAINING,
    (PullState.COMPLETE, PullStep.CONFIRM): PullState.COMMITTED,
    (PullState.COMPLETE, PullStep.FAIL): PullState.DRAINING,
    (PullState.DRAINING, PullStep.FALL_QUIET): PullState.QUIET,
}


def next_state(state: PullState, step: PullStep) -> PullState:
    """Raises InternalError for a step that the state does not know."""
    try:
        return TRANSITIONS[state, step]
    except KeyError:
        raise InternalError(f"a transfer that is {state.value} cannot {step.value}") from None


@dataclass(frozen=True, slots=True)
class PullSource:
    """A rank of the peer that prefills. num_blocks: of its slab, which bounds the ids it may announce."""

    rank: int
    peer: PeerId
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PullChunkRead:
    """A read of an open transfer is done, and more is to come."""

    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class PullComplete:
    """Every rank is covered and read: ask for the confirmation. elapsed_s: time on the wire, summed over the reads."""

    transfer_id: TransferId
    num_bytes: int
    num_reads: int
    num_descriptors: int
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class PullCommitted:
    """The peer confirmed: the destination blocks hold the prompt's KV, and the transfer is over."""

    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class PullFailed:
    """The transfer came to nothing by itself. Its blocks are in quarantine until PullQuiet."""

    transfer_id: TransferId
    reason: str


@dataclass(frozen=True, slots=True)
class PullQuiet:
    """A failed or abandoned transfer is over: nothing can write its destination blocks any more."""

    transfer_id: TransferId


PullEvent = PullChunkRead | PullComplete | PullCommitted | PullFailed | PullQuiet


@dataclass(slots=True)
class _Coverage:
    """Tokens [first of the transfer, end_token) of one rank were announced, in num_chunks chunks."""

    source: PullSource
    end_token: int
    num_chunks: int = 0


@dataclass(slots=True, eq=False)
class _Pull:
    """first_token is num_cached_tokens: what lies before it never travels."""

    transfer_id: TransferId
    first_token: int
    num_prompt_tokens: int
    destinations: tuple[BlockId, ...]
    ranks: dict[int, _Coverage]
    state: PullState = PullState.OPEN
    open_reads: dict[ReadId, PeerId] = field(default_factory=dict)
    draining_since_s: float = 0.0
    num_bytes: int = 0
    num_reads: int = 0
    num_descriptors: int = 0
    elapsed_s: float = 0.0

    @property
    def is_read(self) -> bool:
        is_covered = all(rank.end_token == self.num_prompt_tokens for rank in self.ranks.values())
        return is_covered and not self.open_reads

    def step(self, step: PullStep) -> None:
        self.state = next_state(self.state, step)


class PullTable:
    """The transfers of one reading rank. Its reads have ids of its own making and one transport to run on.

    counters: transfers committed, failed, abandoned:REASON; and what came too late or for nobody: ignored:WHAT.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._pulls: dict[TransferId, _Pull] = {}
        self._by_read: dict[ReadId, _Pull] = {}
        self._read_ids = count(1)
        self.counters: Counter[str] = Counter()

    @property
    def num_open(self) -> int:
        """Transfers whose blocks are still theirs, draining ones included."""
        return len(self._pulls)

    @property
    def num_open_reads(self) -> int:
        return len(self._by_read)

    @property
    def num_quarantined_blocks(self) -> int:
        return sum(len(p.destinations) for p in self._pulls.values() if p.state is PullState.DRAINING)

    def state(self, transfer_id: TransferId) -> PullState | None:
        """None once it is committed or quiet."""
        pull = self._pulls.get(transfer_id)
        return pull.state if pull else None

    def open(
        self,
        transfer_id: TransferId,
        sources: Sequence[PullSource],
        num_cached_tokens: int,
        num_prompt_tokens: int,
        destinations: tuple[BlockId, ...],
    ) -> None:
        """Expect tokens [num_cached_tokens, num_prompt_tokens) from every source, into `destinations` in order."""
        assert transfer_id not in self._pulls, f"transfer {transfer_id} is open already"
        assert num_cached_tokens % self._block_size == 0, f"{num_cached_tokens} cached tokens are not whole blocks"
        assert num_cached_tokens < num_prompt_tokens, f"nothing to pull: {num_cached_tokens} of {num_prompt_tokens}"
        assert len(destinations) == self._num_blocks(num_cached_tokens, num_prompt_tokens), f"{len(destinations)}"
        ranks = {source.rank: _Coverage(source, num_cached_tokens) for source in sources}
        assert len(ranks) == len(sources) > 0, f"ranks must differ: {sources}"
        self._pulls[transfer_id] = _Pull(transfer_id, num_cached_tokens, num_prompt_tokens, destinations, ranks)

    def chunk(
        self,
        transfer_id: TransferId,
        rank: int,
        seq: int,
        first_token: int,
        end_token: int,
        blocks: tuple[BlockId, ...],
    ) -> list[Read]:
        """An announced chunk becomes the read to submit. Nothing comes of one for a transfer that is over or draining.

        Raises ProtocolError, with the transfer unchanged, when the chunk is not the rank's next one in number and
        range, is not whole blocks, or names a block outside the peer's slab; the caller abandons the transfer then.
        """
        pull = self._pulls.get(transfer_id)
        if pull is None or pull.state is PullState.DRAINING:
            self.counters["ignored:chunk"] += 1
            return []
        coverage = pull.ranks.get(rank)
        if coverage is None:
            raise ProtocolError(f"chunk {seq}: rank {rank} is none of {sorted(pull.ranks)}")
        self._check(pull, coverage, seq, first_token, end_token, blocks)
        start = self._num_blocks(pull.first_token, first_token)
        destinations = pull.destinations[start : start + len(blocks)]
        read = Read(ReadId(next(self._read_ids)), coverage.source.peer, blocks, destinations)
        coverage.end_token = end_token
        coverage.num_chunks += 1
        pull.open_reads[read.read_id] = read.peer
        self._by_read[read.read_id] = pull
        return [read]

    def _check(
        self,
        pull: _Pull,
        coverage: _Coverage,
        seq: int,
        first_token: int,
        end_token: int,
        blocks: tuple[BlockId, ...],
    ) -> None:
        name = f"chunk {seq} [{first_token}, {end_token}) of rank {coverage.source.rank}"
        if seq != coverage.num_chunks:
            raise ProtocolError(f"{name}: expected chunk {coverage.num_chunks}")
        if first_token != coverage.end_token:
            raise ProtocolError(f"{name}: expected to start at token {coverage.end_token}")
        if not first_token < end_token <= pull.num_prompt_tokens:
            raise ProtocolError(f"{name}: empty, or past the prompt's {pull.num_prompt_tokens} tokens")
        if end_token % self._block_size and end_token != pull.num_prompt_tokens:
            raise ProtocolError(f"{name}: ends inside a block of {self._block_size} before the prompt does")
        if len(blocks) != self._num_blocks(first_token, end_token):
            raise ProtocolError(f"{name}: {len(blocks)} blocks of {self._block_size} tokens")
        outside = [block for block in blocks if not 0 <= block < coverage.source.num_blocks]
        if outside:
            raise ProtocolError(f"{name}: block {outside[0]} is outside the peer's {coverage.source.num_blocks}")

    def _num_blocks(self, first_token: int, end_token: int) -> int:
        """Blocks of tokens [first_token, end_token), the first on a block boundary."""
        return -(-(end_token - first_token) // self._block_size)

    # ------------------------------------------------------------ what the transport saw

    def on_event(self, event: TransportEvent, now_s: float) -> list[PullEvent]:
        """Events of other commands, and of reads that are over, change nothing; the latter are counted."""
        match event:
            case ReadDone():
                return self._on_done(event)
            case ReadFailed(read_id, reason, is_quiet):
                return self._on_failed(read_id, reason, is_quiet, now_s)
            case ReadQuiet(read_id):
                return self._on_quiet(read_id)
            case PeerLost(peer, reason):
                return self._on_lost(peer, reason, now_s)
            case _:
                return []

    def _on_done(self, done: ReadDone) -> list[PullEvent]:
        pull = self._close_read(done.read_id, "done")
        if pull is None:
            return []
        pull.num_bytes += done.num_bytes
        pull.num_reads += 1
        pull.num_descriptors += done.num_descriptors
        pull.elapsed_s += done.elapsed_s
        if pull.state is PullState.DRAINING:
            return self._if_quiet(pull)
        if not pull.is_read:
            return [PullChunkRead(pull.transfer_id)]
        pull.step(PullStep.READ_ALL)
        return [PullComplete(pull.transfer_id, pull.num_bytes, pull.num_reads, pull.num_descriptors, pull.elapsed_s)]

    def _on_failed(self, read_id: ReadId, reason: str, is_quiet: bool, now_s: float) -> list[PullEvent]:
        pull = self._by_read.get(read_id)
        if is_quiet or pull is None:
            pull = self._close_read(read_id, "failed")
        return self._fail(pull, reason, now_s) if pull else []

    def _on_quiet(self, read_id: ReadId) -> list[PullEvent]:
        pull = self._close_read(read_id, "quiet")
        return self._if_quiet(pull) if pull else []

    def _on_lost(self, peer: PeerId, reason: str, now_s: float) -> list[PullEvent]:
        """Every read from it is quiet; a transfer that still needed the peer has failed."""
        events: list[PullEvent] = []
        for pull in list(self._pulls.values()):
            for read_id in [r for r, source in pull.open_reads.items() if source == peer]:
                self._close_read(read_id, "lost")
            needs_peer = any(rank.source.peer == peer for rank in pull.ranks.values())
            if needs_peer and pull.state is not PullState.COMPLETE:
                events += self._fail(pull, f"{peer} lost: {reason}", now_s)
        return events

    def _close_read(self, read_id: ReadId, what: str) -> _Pull | None:
        pull = self._by_read.pop(read_id, None)
        if pull is None:
            self.counters[f"ignored:{what}"] += 1
            return None
        del pull.open_reads[read_id]
        return pull

    # ------------------------------------------------------------ how it ends

    def confirm(self, transfer_id: TransferId, valid: bool, now_s: float) -> list[PullEvent]:
        """The peer's Released{valid}. A commit only if every rank was read before; else the transfer has failed."""
        pull = self._pulls.get(transfer_id)
        if pull is None or pull.state is PullState.DRAINING:
            self.counters["ignored:confirm"] += 1
            return []
        if not valid:
            return self._fail(pull, "the peer refused to confirm", now_s)
        if pull.state is not PullState.COMPLETE:
            return self._fail(pull, "confirmed before everything was read", now_s)
        pull.step(PullStep.CONFIRM)
        del self._pulls[transfer_id]
        self.counters["committed"] += 1
        return [PullCommitted(transfer_id)]

    def abandon(self, transfer_id: TransferId, reason: str, now_s: float) -> list[PullEvent]:
        """The caller wants it no more and knows that it failed: PullQuiet follows. reason: a short label."""
        pull = self._pulls.get(transfer_id)
        if pull is None or pull.state is PullState.DRAINING:
            self.counters["ignored:abandon"] += 1
            return []
        self.counters[f"abandoned:{reason}"] += 1
        return self._drain(pull, now_s)

    def overdue(self, now_s: float, quarantine_s: float) -> list[PeerId]:
        """Peers that have kept blocks in quarantine for too long: to be cut, each once until it is answered."""
        overdue = (
            peer
            for pull in self._pulls.values()
            if pull.state is PullState.DRAINING and now_s - pull.draining_since_s >= quarantine_s
            for peer in pull.open_reads.values()
        )
        return _unique(overdue)

    def _fail(self, pull: _Pull, reason: str, now_s: float) -> list[PullEvent]:
        if pull.state is PullState.DRAINING:
            return self._if_quiet(pull)
        self.counters["failed"] += 1
        return [PullFailed(pull.transfer_id, reason), *self._drain(pull, now_s)]

    def _drain(self, pull: _Pull, now_s: float) -> list[PullEvent]:
        pull.step(PullStep.FAIL)
        pull.draining_since_s = now_s
        return self._if_quiet(pull)

    def _if_quiet(self, pull: _Pull) -> list[PullEvent]:
        if pull.open_reads:
            return []
        pull.step(PullStep.FALL_QUIET)
        del self._pulls[pull.transfer_id]
        return [PullQuiet(pull.transfer_id)]


def _unique(peers: Iterable[PeerId]) -> list[PeerId]:
    return list(dict.fromkeys(peers))

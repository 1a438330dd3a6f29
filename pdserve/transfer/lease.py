"""Leases on blocks that a peer may read: decided here and nowhere else, in order of arrival. Pure; transport thread.

    LIVE ─release─▶ RELEASED     answered valid, at once: the reader's bytes are the prompt's
      └──revoke──▶ REVOKED       answered invalid from then on

Revoke before free: whoever wants the blocks of a live lease back (expiry, abort, stream end, failed prefill, flush) has
it marked REVOKED here first, and only then tells the owner of the blocks, who drops the lease's references on that
word alone. So no block of a lease that can still answer valid is ever given out anew. (Spec: read, confirm, commit.)
"""

from __future__ import annotations

import enum
import heapq
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from pdserve.errors import InternalError
from pdserve.request import BlockId, LeaseId, RequestId

DEFAULT_LEASE_S = 30.0
MAX_REMEMBERED = 4096


class LeaseState(enum.Enum):
    LIVE = "live"
    RELEASED = "released"
    REVOKED = "revoked"


class LeaseEvent(enum.Enum):
    ANNOUNCE = "announce"
    RENEW = "renew"
    RELEASE = "release"
    REVOKE = "revoke"


# What is not here changes nothing: an ended lease stays as it ended, whatever still arrives for it.
TRANSITIONS: dict[tuple[LeaseState, LeaseEvent], LeaseState] = {
    (LeaseState.LIVE, LeaseEvent.ANNOUNCE): LeaseState.LIVE,
    (LeaseState.LIVE, LeaseEvent.RENEW): LeaseState.LIVE,
    (LeaseState.LIVE, LeaseEvent.RELEASE): LeaseState.RELEASED,
    (LeaseState.LIVE, LeaseEvent.REVOKE): LeaseState.REVOKED,
}


@dataclass(slots=True)
class _Lease:
    lease_id: LeaseId
    request_id: RequestId
    expires_s: float
    state: LeaseState = LeaseState.LIVE
    generations: list[tuple[BlockId, int]] = field(default_factory=list)  # one a reference, as announced


@dataclass(frozen=True, slots=True)
class RevokedLease:
    """A lease that will never answer valid again; its references may go."""

    lease_id: LeaseId
    request_id: RequestId
    reason: str


class LeaseTable:
    """The leases of one incarnation of one rank. Times are seconds on the caller's monotonic clock.

    counters: opened, released, revoked:REASON, and what came for leases that do not live: EVENT:ended, EVENT:unknown
    (a stale, consumed or forged id); release:generation_mismatch is a fault of ours.
    """

    def __init__(self, lease_s: float = DEFAULT_LEASE_S) -> None:
        self._lease_s = lease_s
        self._live: dict[LeaseId, _Lease] = {}
        self._by_request: dict[RequestId, LeaseId] = {}
        self._ended: OrderedDict[LeaseId, LeaseState] = OrderedDict()  # the latest MAX_REMEMBERED
        self._expiries: list[tuple[float, LeaseId]] = []  # heap; one entry a lease, maybe earlier than its true expiry
        self.counters: Counter[str] = Counter()

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_held_blocks(self) -> int:
        """References that live leases own; a block that two leases announced counts twice."""
        return sum(len(lease.generations) for lease in self._live.values())

    @property
    def next_expiry_s(self) -> float | None:
        """When `expire` may have something to do; never later than the first true expiry."""
        return self._expiries[0][0] if self._expiries else None

    def state(self, lease_id: LeaseId) -> LeaseState | None:
        """None for an id that never was, or that ended longer ago than is remembered."""
        return LeaseState.LIVE if lease_id in self._live else self._ended.get(lease_id)

    def live_lease_of(self, request_id: RequestId) -> LeaseId | None:
        return self._by_request.get(request_id)

    def request_of(self, lease_id: LeaseId) -> RequestId | None:
        """The request of a live lease."""
        lease = self._live.get(lease_id)
        return lease.request_id if lease else None

    def open(self, lease_id: LeaseId, request_id: RequestId, now_s: float) -> None:
        """Raises InternalError when the id was used before or the request has a live lease."""
        if self.state(lease_id) is not None:
            raise InternalError(f"lease {lease_id} was used before: it is {self.state(lease_id)}")
        if request_id in self._by_request:
            raise InternalError(f"request {request_id} has the live lease {self._by_request[request_id]} already")
        lease = _Lease(lease_id, request_id, now_s + self._lease_s)
        self._live[lease_id] = lease
        self._by_request[request_id] = lease_id
        heapq.heappush(self._expiries, (lease.expires_s, lease_id))
        self.counters["opened"] += 1

    def announce(self, lease_id: LeaseId, blocks: tuple[BlockId, ...], generations: tuple[int, ...]) -> bool:
        """Put blocks under the lease, before anybody is told their ids; False = do not tell, the lease has ended."""
        assert len(blocks) == len(generations), f"{len(blocks)} blocks, {len(generations)} generations"
        lease = self._apply(lease_id, LeaseEvent.ANNOUNCE)
        if lease is None:
            return False
        lease.generations += zip(blocks, generations, strict=True)
        return True

    def renew(self, lease_id: LeaseId, now_s: float) -> bool:
        """The reader lives. False when the lease does not."""
        lease = self._apply(lease_id, LeaseEvent.RENEW)
        if lease is None:
            return False
        lease.expires_s = now_s + self._lease_s
        return True

    def release(self, lease_id: LeaseId, current_generation: Callable[[BlockId], int]) -> bool:
        """The reader has read everything: True = and what it read was pinned all the while, so it may commit.

        A lease past its time that nobody revoked yet is LIVE: valid speaks of pins, not of time. current_generation:
        of a block in the pool; a block given out anew since it was announced is a fault of ours and never valid.
        """
        lease = self._apply(lease_id, LeaseEvent.RELEASE)
        if lease is None:
            return False
        if any(current_generation(block) != generation for block, generation in lease.generations):
            self.counters["release:generation_mismatch"] += 1
            return False
        self.counters["released"] += 1
        return True

    def revoke(self, lease_id: LeaseId, reason: str) -> RevokedLease | None:
        """After this the lease is never valid, and the caller tells the blocks' owner; None: it had ended before.

        reason: a short label.
        """
        lease = self._apply(lease_id, LeaseEvent.REVOKE)
        if lease is None:
            return None
        self.counters[f"revoked:{reason}"] += 1
        return RevokedLease(lease.lease_id, lease.request_id, reason)

    def expire(self, now_s: float) -> list[RevokedLease]:
        """Revoke every lease whose time is over, earliest first."""
        expired: list[RevokedLease] = []
        while self._expiries and self._expiries[0][0] <= now_s:
            lease = self._live.get(heapq.heappop(self._expiries)[1])
            if lease is not None and lease.expires_s > now_s:  # renewed since it was put on the heap
                heapq.heappush(self._expiries, (lease.expires_s, lease.lease_id))
            elif lease is not None and (revoked := self.revoke(lease.lease_id, "expired")):
                expired.append(revoked)
        return expired

    def _apply(self, lease_id: LeaseId, event: LeaseEvent) -> _Lease | None:
        """The lease, if it lived when the event came. Anything for other ids is counted, never an error."""
        state = self.state(lease_id)
        if state is None or (state, event) not in TRANSITIONS:
            self.counters[f"{event.value}:{'unknown' if state is None else 'ended'}"] += 1
            return None
        lease = self._live[lease_id]
        lease.state = TRANSITIONS[state, event]
        if lease.state is not LeaseState.LIVE:
            self._end(lease)
        return lease

    def _end(self, lease: _Lease) -> None:
        del self._live[lease.lease_id]
        del self._by_request[lease.request_id]
        self._ended[lease.lease_id] = lease.state
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)

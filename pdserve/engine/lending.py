"""What peers read from this rank: the lease table between the loop, which owns the blocks, and the front.

Rules it keeps: revoke first, then tell the loop; announce to the table first, then to the peer. Transport thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from pdserve.engine.messages import (
    AnnounceChunk,
    ChunkAnnounced,
    FromTransport,
    LeaseAnswer,
    LeaseGone,
    LeaseOpened,
)
from pdserve.request import BlockId, LeaseId, RequestId
from pdserve.scheduler.plan import Event, LeaseReleased, LeaseRevoked
from pdserve.transfer.checksum import Checksums, Hashes
from pdserve.transfer.lease import LeaseState, LeaseTable, RevokedLease


class Lending:
    """generation: of a block now. checksums: of the blocks, where they are announced with their hashes."""

    def __init__(
        self,
        lease_s: float,
        tell_front: Callable[[FromTransport], None],
        tell_loop: Callable[[Event], None],
        generation: Callable[[BlockId], int],
        checksums: Checksums | None,
    ) -> None:
        self._leases = LeaseTable(lease_s)
        self._tell_front = tell_front
        self._tell_loop = tell_loop
        self._generation = generation
        self._checksums = checksums
        self._announced: Counter[LeaseId] = Counter()

    @property
    def num_live(self) -> int:
        return self._leases.num_live

    def counters(self) -> dict[str, int]:
        return {f"lease:{name}": count for name, count in list(self._leases.counters.items())}

    def open(self, lease_id: LeaseId) -> None:
        """It bears the id of its request."""
        self._leases.open(lease_id, RequestId(lease_id), time.monotonic())
        self._tell_front(LeaseOpened(lease_id))

    def announce(self, chunk: AnnounceChunk) -> None:
        if self._leases.announce(chunk.lease_id, chunk.blocks, chunk.generations):
            seq = self._announced[chunk.lease_id]
            self._announced[chunk.lease_id] += 1
            if self._checksums is None:
                self._tell_chunk(chunk, seq, ())
            else:
                self._checksums.hash(chunk.blocks, lambda hashes: self._tell_chunk(chunk, seq, hashes))

    def _tell_chunk(self, chunk: AnnounceChunk, seq: int, hashes: Hashes) -> None:
        """Unless the lease ended while its blocks were hashed: they may be somebody else's by now."""
        if self._leases.state(chunk.lease_id) is LeaseState.LIVE:
            self._tell_front(
                ChunkAnnounced(chunk.lease_id, seq, chunk.first_token, chunk.end_token, chunk.blocks, hashes)
            )

    def renew(self, lease_id: LeaseId) -> None:
        self._leases.renew(lease_id, time.monotonic())

    def release(self, lease_id: LeaseId) -> None:
        was_live = self._leases.state(lease_id) is LeaseState.LIVE
        is_valid = self._leases.release(lease_id, self._generation)
        self._tell_front(LeaseAnswer(lease_id, is_valid))
        if was_live:
            self._announced.pop(lease_id, None)
            self._tell_loop(LeaseReleased(RequestId(lease_id)))

    def revoke(self, lease_id: LeaseId, reason: str) -> None:
        """reason: a short label."""
        revoked = self._leases.revoke(lease_id, reason)
        if revoked is not None:
            self._on_revoked(revoked)

    def expire(self, now_s: float) -> None:
        for lease in self._leases.expire(now_s):
            self._on_revoked(lease)

    def _on_revoked(self, lease: RevokedLease) -> None:
        self._announced.pop(lease.lease_id, None)
        self._tell_loop(LeaseRevoked(lease.request_id))
        self._tell_front(LeaseGone(lease.lease_id, f"the lease was revoked: {lease.reason}"))

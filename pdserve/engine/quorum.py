"""What the processes of one rank saw of their transports, each for its part of a block: when it counts for the whole.

A transfer is received when every part is, and quiet when it was given up and nothing can write any part. A lease has
ended when nobody reads any part; it was released only if every part was.
"""

from __future__ import annotations

from collections.abc import Hashable

from pdserve.request import RequestId, TransferId
from pdserve.scheduler.plan import Event, KvQuiet, KvReceived, LeaseReleased, LeaseRevoked


class Quorum:
    """num_members: processes of the rank, each of which says once what becomes of a transfer or a lease."""

    def __init__(self, num_members: int) -> None:
        self._num_members = num_members
        self._said: dict[Hashable, set[int]] = {}
        self._revoked: set[RequestId] = set()
        self._abandoned: set[TransferId] = set()

    def abandon(self, transfer_id: TransferId) -> None:
        """Every process is about to be told that nobody waits for it, and says that it is quiet, again if need be."""
        self._abandoned.add(transfer_id)

    @property
    def num_open(self) -> int:
        """What some have said or are to say, and not all have said yet."""
        return len(self._said) + len(self._revoked) + len(self._abandoned)

    def add(self, member: int, event: Event) -> list[Event]:
        """What counts from now on, as `member` was the last of all to see it."""
        match event:
            case KvReceived(transfer_id):
                return [event] if self._is_last(member, ("received", transfer_id)) else []
            case KvQuiet(transfer_id):
                return self._on_quiet(member, transfer_id)
            case LeaseReleased(request_id) | LeaseRevoked(request_id):
                return self._on_ended(member, request_id, is_revoked=isinstance(event, LeaseRevoked))
            case _:
                raise AssertionError(f"{event} is not seen by transports")

    def _is_last(self, member: int, what: Hashable) -> bool:
        said = self._said.setdefault(what, set())
        said.add(member)
        if len(said) < self._num_members:
            return False
        del self._said[what]
        return True

    def _on_quiet(self, member: int, transfer_id: TransferId) -> list[Event]:
        if transfer_id not in self._abandoned or not self._is_last(member, ("quiet", transfer_id)):
            return []
        self._abandoned.discard(transfer_id)
        self._said.pop(("received", transfer_id), None)  # by some of them, before it was given up
        return [KvQuiet(transfer_id)]

    def _on_ended(self, member: int, request_id: RequestId, *, is_revoked: bool) -> list[Event]:
        if is_revoked:
            self._revoked.add(request_id)
        if not self._is_last(member, ("ended", request_id)):
            return []
        if request_id not in self._revoked:
            return [LeaseReleased(request_id)]
        self._revoked.discard(request_id)
        return [LeaseRevoked(request_id)]

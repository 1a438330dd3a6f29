"""Everybody the scheduler knows, by state and in submission order; slots are handed out here."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from pdserve.request import RequestId, Route, Side, TransferId
from pdserve.scheduler.state import Move, State, Tracked, Transfer

_order = attrgetter("order")


class Residents:
    """Live requests and transfers. `prefilling` and `decoding` are in submission order, as is the queue."""

    def __init__(self, num_slots: int) -> None:
        self.by_id: dict[RequestId, Tracked] = {}
        self.prefilling: list[Tracked] = []
        self.decoding: list[Tracked] = []
        self.transfers: dict[TransferId, Transfer] = {}
        self.num_gated_waiting = 0
        self.num_gated_prefilling = 0
        self.num_receiving = 0
        self.num_fetching = 0
        self.num_restoring = 0
        self.num_leases = 0
        self.retracted: list[Tracked] = []
        self._waiting: list[Tracked] = []
        self._free_slots = list(reversed(range(num_slots)))
        self._num_slots = num_slots
        self._num_transfers_opened = 0

    # ------------------------------------------------------------ queue

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def waiting_requests(self) -> Iterator[Tracked]:
        return iter(self._waiting)

    def first_waiting(self, count: int) -> list[Tracked]:
        """The oldest `count` of the queue."""
        return self._waiting[:count]

    def enqueue(self, request: Tracked) -> None:
        """Into the queue at its place: by priority, then by submission."""
        self.by_id[request.request_id] = request
        insort(self._waiting, request, key=_order)
        self.num_gated_waiting += request.route.is_gated

    def _leave_prefill(self, request: Tracked) -> None:
        self.prefilling.remove(request)
        self.num_gated_prefilling -= request.route.is_gated

    def _leave_queue(self, request: Tracked) -> None:
        del self._waiting[bisect_left(self._waiting, request.order, key=_order)]
        self.num_gated_waiting -= request.route.is_gated

    # ------------------------------------------------------------ into work

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def admit(self, request: Tracked) -> None:
        """From the queue to a slot and its first chunk."""
        self._leave_queue(request)
        request.move(Move.ADMIT)
        request.slot = self._free_slots.pop()
        request.has_lease = request.route.decode is Side.REMOTE
        self.num_leases += request.has_lease
        insort(self.prefilling, request, key=_order)
        self.num_gated_prefilling += request.route.is_gated

    def reserve(self, request: Tracked) -> TransferId:
        """From the queue to a slot; its KV comes by the transfer of the returned id, which the caller registers."""
        self._leave_queue(request)
        request.move(Move.RESERVE)
        request.slot = self._free_slots.pop()
        self.num_receiving += 1
        self._num_transfers_opened += 1
        request.transfer_id = TransferId(self._num_transfers_opened)
        return request.transfer_id

    def start_decoding(self, request: Tracked) -> None:
        """Its whole prompt is computed, here or by a peer."""
        if request.state is State.PREFILLING:
            self._leave_prefill(request)
            request.move(Move.PREFILLED)
        else:
            self.num_receiving -= 1
            request.move(Move.RECEIVED)
        insort(self.decoding, request, key=_order)

    def send_off(self, request: Tracked) -> None:
        """Prefilled for a peer: it needs its blocks until the lease ends, but its slot no more."""
        self._leave_prefill(request)
        request.move(Move.SENT_OFF)
        if not request.route.holds_slot_on_wire:
            self._give_back_slot(request)

    def end_lease(self, request: Tracked) -> None:
        """No peer reads its blocks any more."""
        request.has_lease = False
        self.num_leases -= 1

    # ------------------------------------------------------------ detours

    def start_fetch(self, request: Tracked) -> None:
        """Out of the queue's head of line; its wish for a prefill counts on."""
        del self._waiting[bisect_left(self._waiting, request.order, key=_order)]
        request.move(Move.FETCH)
        self.num_fetching += 1

    def finish_fetch(self, request: Tracked) -> None:
        """Back at its place in the queue."""
        request.move(Move.FETCHED)
        self.num_fetching -= 1
        insort(self._waiting, request, key=_order)

    def retract(self, request: Tracked) -> None:
        """Its slot goes; its image is waited for and then brought back in the order of submission."""
        if request.state is State.PREFILLING:
            self._leave_prefill(request)
        else:
            self._leave_decode(request)
        request.move(Move.RETRACT)
        self._give_back_slot(request)
        insort(self.retracted, request, key=_order)

    def restore(self, request: Tracked) -> None:
        self._leave_retracted(request)
        request.move(Move.RESTORE)
        request.slot = self._free_slots.pop()
        self.num_restoring += 1

    def resume(self, request: Tracked) -> None:
        """Its blocks are back: it goes on where it was."""
        self.num_restoring -= 1
        if request.resumes_decoding:
            request.move(Move.RESUME_DECODE)
            insort(self.decoding, request, key=_order)
        else:
            request.move(Move.RESUME_PREFILL)
            insort(self.prefilling, request, key=_order)
            self.num_gated_prefilling += request.route.is_gated

    def _leave_decode(self, request: Tracked) -> None:
        del self.decoding[bisect_left(self.decoding, request.order, key=_order)]

    def _leave_retracted(self, request: Tracked) -> None:
        del self.retracted[bisect_left(self.retracted, request.order, key=_order)]

    # ------------------------------------------------------------ out of work

    def requeue(self, request: Tracked, route: Route) -> None:
        """From a transfer that came to nothing back to its old place; its blocks are given back already."""
        self.num_receiving -= 1
        request.move(Move.REQUEUE)
        self._give_back_slot(request)
        request.route = route
        request.blocks = []
        request.num_computed = 0
        self.enqueue(request)

    def retire(self, request: Tracked) -> None:
        """Out of the queue or its list; it is not scheduled again."""
        if request.state is State.WAITING:
            self._leave_queue(request)
        elif request.state is State.PREFILLING:
            self._leave_prefill(request)
        elif request.state is State.RECEIVING:
            self.num_receiving -= 1
        elif request.state is State.DECODING:
            self._leave_decode(request)
        elif request.state is State.FETCHING:
            self.num_fetching -= 1
            self.num_gated_waiting -= request.route.is_gated
        elif request.state is State.RETRACTED:
            self._leave_retracted(request)
        elif request.state is State.RESTORING:
            self.num_restoring -= 1

    def forget(self, request: Tracked) -> None:
        """It holds nothing any more."""
        self._give_back_slot(request)
        del self.by_id[request.request_id]

    def _give_back_slot(self, request: Tracked) -> None:
        if request.slot is not None:
            self._free_slots.append(request.slot)
            request.slot = None

    def forget_transfer(self, transfer: Transfer) -> None:
        del self.transfers[transfer.transfer_id]

    # ------------------------------------------------------------ truth

    def check_integrity(self) -> None:
        for state, listed in (
            (State.WAITING, self._waiting),
            (State.PREFILLING, self.prefilling),
            (State.DECODING, self.decoding),
            (State.RETRACTED, self.retracted),
        ):
            assert listed == sorted(listed, key=_order), f"{state.name} requests are out of order"
            assert {r.request_id for r in listed} == {i for i, r in self.by_id.items() if r.state is state}
        in_queue = [r for r in self.by_id.values() if r.state in (State.WAITING, State.FETCHING)]
        assert self.num_gated_waiting == sum(r.route.is_gated for r in in_queue)
        assert self.num_fetching == sum(r.state is State.FETCHING for r in self.by_id.values())
        assert self.num_restoring == sum(r.state is State.RESTORING for r in self.by_id.values())
        assert self.num_gated_prefilling == sum(r.route.is_gated for r in self.prefilling)
        assert self.num_receiving == sum(r.state is State.RECEIVING for r in self.by_id.values())
        assert self.num_leases == sum(r.has_lease for r in self.by_id.values())
        slots = [r.slot for r in self.by_id.values() if r.slot is not None]
        assert sorted(slots + self._free_slots) == list(range(self._num_slots)), "a slot is lost or shared"

"""The safety rules R1 to R6 of a link, on a wire whose every answer the test chooses."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.kv.head_ranges import whole_block
from pdserve.request import BlockId
from pdserve.transfer.base import PeerId, Read, ReadDone, ReadFailed, ReadId, ReadQuiet, TransportEvent
from pdserve.transfer.link import ENDED, HandleState, NotPosted, PeerLink, Sighting
from pdserve.transfer.pieces import Pieces

POSTED = Sighting(HandleState.POSTED)
DONE = Sighting(HandleState.DONE)
GONE = Sighting(HandleState.DISCONNECTED, "gone")
FAULT = Sighting(HandleState.DOUBTFUL, "fault")


@dataclass
class HandWire:
    """Handles are numbers in order of posting; `says` holds what each answers from now on."""

    says: dict[int, Sighting] = field(default_factory=dict)
    posted: list[tuple[list[int], list[int]]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)
    at_once: Sighting = POSTED
    refuses: bool = False
    is_destroyed: bool = False
    seconds_a_post: float = 0.0
    now_s: float = 0.0

    def post(self, sources: list[int], destinations: list[int]) -> tuple[int, Sighting]:
        if self.refuses:
            raise NotPosted("refused")
        self.posted.append((sources, destinations))
        self.now_s += self.seconds_a_post
        return len(self.posted) - 1, self.at_once

    def post_warm_up(self) -> tuple[int, Sighting]:
        return self.post([], [])

    def poll(self, handle: int) -> Sighting:
        assert not self.is_destroyed
        return self.says.get(handle, POSTED)

    def release(self, handle: int) -> None:
        self.released.append(handle)

    def destroy(self) -> None:
        self.is_destroyed = True


def new_link(num_blocks: int = 64, block_bytes: int = 1 << 20) -> tuple[PeerLink[int], HandWire]:
    wire = HandWire()
    return PeerLink(wire, Pieces(num_blocks, whole_block(block_bytes)), lambda: wire.now_s), wire


def read(read_id: int, num_blocks: int = 1, first: int = 0) -> Read:
    ids = tuple(BlockId(first + i) for i in range(num_blocks))
    return Read(ReadId(read_id), PeerId("p"), ids, ids)


def test_r1_a_read_is_done_only_when_every_handle_is() -> None:
    link, wire = new_link()
    link.submit(read(1, 20))  # 16 blocks, then 4
    wire.says[0] = DONE
    assert link.advance() == []
    assert link.advance() == []
    assert len(wire.posted) == 2
    wire.says[1] = DONE
    (done,) = link.advance()
    assert done == ReadDone(ReadId(1), 20 << 20, 20, 0.0)
    assert wire.released == [0, 1]


def test_r1_a_handle_that_is_done_when_posted_needs_no_other_look() -> None:
    link, wire = new_link()
    wire.at_once = DONE
    link.submit(read(1, 40))
    assert [type(event) for event in link.advance()] == [ReadDone]
    assert link.num_open_handles == 0


def test_r2_a_fault_is_not_quiet_and_its_bytes_are_waited_for() -> None:
    link, wire = new_link()
    link.submit(read(1))
    link.advance()
    wire.says[0] = FAULT
    assert link.advance() == [ReadFailed(ReadId(1), "fault", is_quiet=False)]
    for answer in (FAULT, POSTED, FAULT):
        wire.says[0] = answer
        assert link.advance() == []
        assert link.num_open_reads == 1
    wire.says[0] = DONE
    assert link.advance() == [ReadQuiet(ReadId(1))]
    assert link.num_open_reads == 0


def test_r2_a_fault_stops_what_is_not_posted_yet_and_waits_for_what_is() -> None:
    link, wire = new_link()
    link.submit(read(1, 40))
    link.advance()
    wire.says[0] = FAULT
    link.advance()
    assert len(wire.posted) == 1


def test_r3_a_disconnect_is_quiet_only_when_every_other_handle_has_ended() -> None:
    link, wire = new_link()
    for read_id in (1, 2, 3):
        link.submit(read(read_id, 2))
    link.advance()
    wire.says = {0: GONE, 1: POSTED, 2: FAULT}
    told = link.advance()
    assert {(e.read_id, e.is_quiet) for e in told if isinstance(e, ReadFailed)} == {(1, False), (2, False), (3, False)}
    assert not wire.is_destroyed
    wire.says[1] = DONE
    assert link.advance() == [ReadQuiet(ReadId(2))]
    assert link.lost_reason is None
    wire.says[2] = GONE
    assert link.advance() == [ReadQuiet(ReadId(1)), ReadQuiet(ReadId(3))]
    assert (link.lost_reason, wire.is_destroyed) == ("gone", True)


def test_r3_when_all_handles_disconnect_at_once_the_reads_fail_quietly() -> None:
    link, wire = new_link()
    link.submit(read(1))
    link.submit(read(2))
    link.advance()
    wire.says = {0: GONE, 1: GONE}
    told = link.advance()
    assert told == [ReadFailed(ReadId(i), "gone", is_quiet=True) for i in (1, 2)]
    assert link.lost_reason == "gone"


def test_r3_a_peer_found_gone_when_posting_is_lost_and_nothing_more_is_posted() -> None:
    link, wire = new_link()
    wire.at_once = GONE
    link.submit(read(1))
    link.submit(read(2))
    assert link.advance() == [ReadFailed(ReadId(i), "gone", is_quiet=True) for i in (1, 2)]
    assert len(wire.posted) == 1


def test_r4_only_handles_that_are_done_are_released() -> None:
    link, wire = new_link()
    for read_id in range(4):
        link.submit(read(read_id, 2))
    link.advance()
    wire.says = {0: DONE, 1: FAULT, 2: POSTED, 3: GONE}
    link.advance()
    link.cut("cut")
    assert wire.released == [0]


def test_r5_a_cut_destroys_first_and_makes_every_read_quiet() -> None:
    link, wire = new_link()
    for read_id in (1, 2, 3):
        link.submit(read(read_id, 40))
    link.advance()
    wire.says[0] = FAULT
    link.advance()
    assert link.cut("cut off") == [
        ReadQuiet(ReadId(1)),
        ReadFailed(ReadId(2), "cut off", is_quiet=True),
        ReadFailed(ReadId(3), "cut off", is_quiet=True),
    ]
    assert wire.is_destroyed
    assert (link.num_open_reads, link.num_open_handles) == (0, 0)


def test_r6_no_more_than_a_quarter_of_the_slab_is_in_flight() -> None:
    link, wire = new_link(num_blocks=64)  # 16 blocks may be on their way
    link.submit(read(1, 12))
    link.submit(read(2, 8))
    link.submit(read(3, 4))
    link.advance()
    assert [len(sources) for sources, _ in wire.posted] == [12]
    wire.says[0] = DONE
    link.advance()
    assert [len(sources) for sources, _ in wire.posted] == [12, 8, 4]


def test_r6_one_handle_is_let_out_however_small_the_slab_is() -> None:
    link, wire = new_link(num_blocks=2)
    link.submit(read(1, 2))
    link.advance()
    assert [len(sources) for sources, _ in wire.posted] == [1]


def test_a_handle_that_was_refused_fails_its_read_quietly_and_no_other() -> None:
    link, wire = new_link()
    link.submit(read(1))
    wire.refuses = True
    assert link.advance() == [ReadFailed(ReadId(1), "refused", is_quiet=True)]
    wire.refuses = False
    link.submit(read(2))
    assert link.advance() == []
    assert link.num_open_reads == 1


def test_reads_take_turns_handle_by_handle() -> None:
    link, wire = new_link(num_blocks=400)  # 100 blocks in flight, 16 a handle
    link.submit(read(1, 48))
    link.submit(read(2, 32, first=100))
    link.advance()
    assert [sources[0] for sources, _ in wire.posted] == [0, 100, 16, 116, 32]


def test_posting_stops_when_its_time_is_used_up_and_goes_on_in_the_next_call() -> None:
    link, wire = new_link(num_blocks=400)
    wire.seconds_a_post = 0.003
    wire.at_once = DONE
    link.submit(read(1, 64))
    link.advance()
    assert len(wire.posted) == 2
    link.advance()
    assert len(wire.posted) == 4


def test_a_warm_up_is_posted_once_polled_and_released() -> None:
    link, wire = new_link()
    assert link.warm() == POSTED
    wire.says[0] = FAULT
    assert link.warm() == FAULT
    wire.says[0] = DONE
    assert link.warm() == DONE
    assert (wire.posted, wire.released) == ([([], [])], [0])


def test_a_warm_up_that_was_refused_says_so() -> None:
    link, wire = new_link()
    wire.refuses = True
    assert link.warm() == Sighting(HandleState.DOUBTFUL, "refused")


READ_SPAN = 100  # in the walk, read n has blocks from n * READ_SPAN on, so that a handle tells its read


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_whatever_the_wire_says_a_read_is_quiet_only_by_r1_r3_or_r5(data: st.DataObject) -> None:
    """A walk: reads come, handles answer anything; the peer is cut at the end if it was not lost before."""
    link, wire = new_link(num_blocks=32)
    told: list[TransportEvent] = []
    num_reads = 0
    for _ in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            link.submit(read(num_reads, data.draw(st.integers(1, 20)), first=num_reads * READ_SPAN))
            num_reads += 1
        for handle in range(len(wire.posted)):
            if wire.says.get(handle, POSTED).state not in ENDED:
                wire.says[handle] = data.draw(st.sampled_from([POSTED, DONE, FAULT, GONE]))
        events = link.advance()
        check_quiet(events, wire)
        told += events
        if link.lost_reason is not None:
            break
    else:
        told += link.cut("cut")
    assert (link.num_open_reads, wire.is_destroyed) == (0, True)
    every_read = list(range(num_reads))
    assert sorted(e.read_id for e in told if isinstance(e, ReadDone | ReadFailed)) == every_read
    assert sorted(e.read_id for e in told if says_quiet(e)) == every_read


def says_quiet(event: TransportEvent) -> bool:
    return isinstance(event, ReadDone | ReadQuiet) or (isinstance(event, ReadFailed) and event.is_quiet)


def check_quiet(events: list[TransportEvent], wire: HandWire) -> None:
    """Each quiet read has only handles that are done, unless all handles to the peer have ended."""
    states = {handle: wire.says.get(handle, POSTED).state for handle in range(len(wire.posted))}
    have_all_ended = all(state in ENDED for state in states.values())
    for event in filter(says_quiet, events):
        assert isinstance(event, ReadDone | ReadFailed | ReadQuiet)
        own = {states[h] for h, (sources, _) in enumerate(wire.posted) if sources[0] // READ_SPAN == event.read_id}
        assert own <= {HandleState.DONE} or (have_all_ended and not isinstance(event, ReadDone))
    assert set(wire.released) == {handle for handle, state in states.items() if state is HandleState.DONE}

"""The states of a request and of a transfer, as tables, and the record the scheduler keeps of each.

A request. Fused it goes WAITING, PREFILLING, DECODING; for a peer's decode WAITING, PREFILLING, SENDING; with a peer's
prefill WAITING, RECEIVING, DECODING. FETCHING is a detour of the queue, RETRACTED and RESTORING are one of work.
STOPPING is for who ends while a round or a lease still uses its blocks:

    WAITING     ──admit──▶ PREFILLING    ──reserve──▶ RECEIVING  ──fetch──▶ FETCHING  ──end──▶ FINISHED
    FETCHING    ──fetched──▶ WAITING     ──end──▶ FINISHED
    PREFILLING  ──prefilled──▶ DECODING  ──sent_off──▶ SENDING   ──retract──▶ RETRACTED
    PREFILLING  ──stop──▶ STOPPING       ──end──▶ FINISHED
    RECEIVING   ──received──▶ DECODING   ──requeue──▶ WAITING    ──end──▶ FINISHED
    DECODING    ──retract──▶ RETRACTED   ──stop──▶ STOPPING      ──end──▶ FINISHED
    SENDING     ──stop──▶ STOPPING       ──end──▶ FINISHED
    RETRACTED   ──restore──▶ RESTORING   ──end──▶ FINISHED
    RESTORING   ──resume_prefill──▶ PREFILLING  ──resume_decode──▶ DECODING  ──end──▶ FINISHED
    STOPPING    ──end──▶ FINISHED

A transfer:

    OPEN        ──commit──▶ QUIET        ──abandon──▶ DRAINING
    DRAINING    ──settle──▶ QUIET
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from pdserve.errors import InternalError
from pdserve.request import BlockHash, BlockId, RequestId, Route, TransferId


class State(enum.Enum):
    WAITING = enum.auto()  # in the queue; holds nothing
    FETCHING = enum.auto()  # its prefix is read from storage; holds no slot, no device block, no head of line
    PREFILLING = enum.auto()  # has its slot and blocks; some of its prompt is left
    RECEIVING = enum.auto()  # has its slot and blocks; a peer prefills
    DECODING = enum.auto()  # everything but the newest token is computed (the first decode included)
    SENDING = enum.auto()  # prefilled; a peer still reads its blocks
    RETRACTED = enum.auto()  # its KV is an image in the host tier; holds no slot and no device block
    RESTORING = enum.auto()  # has its slot and blocks again; the image is being copied into them
    STOPPING = enum.auto()  # ended for its caller; a round or a lease still uses its blocks
    FINISHED = enum.auto()  # holds nothing; forgotten


class Move(enum.Enum):
    ADMIT = enum.auto()
    RESERVE = enum.auto()
    PREFILLED = enum.auto()
    SENT_OFF = enum.auto()
    RECEIVED = enum.auto()
    REQUEUE = enum.auto()
    FETCH = enum.auto()
    FETCHED = enum.auto()
    RETRACT = enum.auto()
    RESTORE = enum.auto()
    RESUME_PREFILL = enum.auto()
    RESUME_DECODE = enum.auto()
    STOP = enum.auto()
    END = enum.auto()


TABLE: dict[tuple[State, Move], State] = {
    (State.WAITING, Move.ADMIT): State.PREFILLING,
    (State.WAITING, Move.RESERVE): State.RECEIVING,
    (State.WAITING, Move.FETCH): State.FETCHING,
    (State.WAITING, Move.END): State.FINISHED,
    (State.FETCHING, Move.FETCHED): State.WAITING,
    (State.FETCHING, Move.END): State.FINISHED,
    (State.PREFILLING, Move.PREFILLED): State.DECODING,
    (State.PREFILLING, Move.SENT_OFF): State.SENDING,
    (State.PREFILLING, Move.RETRACT): State.RETRACTED,
    (State.PREFILLING, Move.STOP): State.STOPPING,
    (State.PREFILLING, Move.END): State.FINISHED,
    (State.RECEIVING, Move.RECEIVED): State.DECODING,
    (State.RECEIVING, Move.REQUEUE): State.WAITING,
    (State.RECEIVING, Move.END): State.FINISHED,
    (State.DECODING, Move.RETRACT): State.RETRACTED,
    (State.DECODING, Move.STOP): State.STOPPING,
    (State.DECODING, Move.END): State.FINISHED,
    (State.SENDING, Move.STOP): State.STOPPING,
    (State.SENDING, Move.END): State.FINISHED,
    (State.RETRACTED, Move.RESTORE): State.RESTORING,
    (State.RETRACTED, Move.END): State.FINISHED,
    (State.RESTORING, Move.RESUME_PREFILL): State.PREFILLING,
    (State.RESTORING, Move.RESUME_DECODE): State.DECODING,
    (State.RESTORING, Move.END): State.FINISHED,
    (State.STOPPING, Move.END): State.FINISHED,
}

HOLDS_BLOCKS = frozenset(
    {State.PREFILLING, State.RECEIVING, State.DECODING, State.SENDING, State.RESTORING, State.STOPPING}
)
HOLDS_IMAGE = frozenset({State.RETRACTED, State.RESTORING})


def after(state: State, move: Move) -> State:
    """The state `move` leads to. Raises InternalError naming both where the table has no such move."""
    try:
        return TABLE[state, move]
    except KeyError:
        raise InternalError(f"no move {move.name} from state {state.name}") from None


class TransferState(enum.Enum):
    OPEN = enum.auto()  # KV is on its way and somebody waits for it
    DRAINING = enum.auto()  # nobody waits; its blocks may still be written
    QUIET = enum.auto()  # nothing can write its blocks any more


class TransferMove(enum.Enum):
    COMMIT = enum.auto()
    ABANDON = enum.auto()
    SETTLE = enum.auto()


TRANSFER_TABLE: dict[tuple[TransferState, TransferMove], TransferState] = {
    (TransferState.OPEN, TransferMove.COMMIT): TransferState.QUIET,
    (TransferState.OPEN, TransferMove.ABANDON): TransferState.DRAINING,
    (TransferState.DRAINING, TransferMove.SETTLE): TransferState.QUIET,
}


def after_transfer(state: TransferState, move: TransferMove) -> TransferState:
    """The state `move` leads to. Raises InternalError naming both where the table has no such move."""
    try:
        return TRANSFER_TABLE[state, move]
    except KeyError:
        raise InternalError(f"no move {move.name} from transfer state {state.name}") from None


@dataclass(slots=True, eq=False)
class Tracked:
    """One live request. tokens: prompt, then answer. Positions are half-open ranges over `tokens`.

    blocks: its block table. num_told_blocks: how many of them the runner knows;
    0 = it has not seen the request in its slot. num_published: full blocks already
    in the prefix cache. hashes: of its full blocks, as far as they were needed.

    image: host blocks that hold its computed tokens while it is retracted. job_id: of the copy or fetch it waits for.
    resumes_decoding: what it goes on with then. num_computed_at_restore: None if it never was restored.
    num_holds: rounds in which the cadence kept its next chunk from running. is_looked_up: storage was asked for its
    prefix.
    """

    request_id: RequestId
    order: tuple[int, int]  # (priority, submission number): candidates go in this order
    route: Route
    tokens: list[int]
    num_prompt_tokens: int
    max_new_tokens: int
    min_new_tokens: int
    stop_token_ids: frozenset[int]
    peer_cached_tokens: int
    reads_prefix_cache: bool
    state: State = State.WAITING
    slot: int | None = None
    blocks: list[BlockId] = field(default_factory=list)
    num_told_blocks: int = 0
    num_computed: int = 0
    num_announced: int = 0
    num_published: int = 0
    num_cached_tokens: int = 0
    hashes: list[BlockHash] = field(default_factory=list)
    transfer_id: TransferId | None = None
    num_passed_over: int = 0
    has_lease: bool = False
    image: list[BlockId] = field(default_factory=list)
    job_id: int | None = None
    resumes_decoding: bool = False
    num_computed_at_restore: int | None = None
    num_holds: int = 0
    is_looked_up: bool = False

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_left_to_compute(self) -> int:
        return len(self.tokens) - self.num_computed

    def move(self, move: Move) -> None:
        self.state = after(self.state, move)


@dataclass(slots=True, eq=False)
class Transfer:
    """KV on its way from a peer. Its destination blocks are its own until it is quiet, whatever its request does."""

    transfer_id: TransferId
    request_id: RequestId
    blocks: tuple[BlockId, ...]
    is_accepted: bool = False
    state: TransferState = TransferState.OPEN

    def move(self, move: TransferMove) -> None:
        self.state = after_transfer(self.state, move)

"""Everything that crosses between a front and a rank process, between a rank's two threads, and between its processes.

Typed msgpack by msgspec, never pickle. Six queues, named for their ends:

    front ──ToRank──▶ loop          front ──ToTransport──▶ transport thread
    front ◀─FromRank─ loop          front ◀─FromTransport─ transport thread
    loop ──LoopCommand──▶ transport thread ──scheduler events──▶ loop       (in one process: not encoded)
    leader ──FromLeader──▶ follower      leader ◀──ToLeader── follower
"""

from __future__ import annotations

import msgspec

from pdserve.kv.head_ranges import BlockMap
from pdserve.kv.layout import Fingerprint
from pdserve.request import (
    BlockId,
    FinishReason,
    LeaseId,
    RankLoad,
    RequestId,
    Route,
    TokenLogprobs,
    TokenRequest,
    TransferId,
)
from pdserve.rounds import Round
from pdserve.scheduler.plan import KvQuiet, KvReceived, LeaseReleased, LeaseRevoked, Row, SlotStart
from pdserve.transfer.base import PeerId


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all that is encoded."""


# ---------------------------------------------------------------- front → loop


class Submit(Message, frozen=True):
    """Compute this. For a remote decode the request's id is the id of the lease its blocks are announced under."""

    request: TokenRequest
    route: Route
    peer_cached_tokens: int = 0


class Abort(Message, frozen=True):
    request_id: RequestId


class GiveUpTransfer(Message, frozen=True):
    """The KV will not come: prefill locally. forced_output: what the client was sent already.

    stays_remote: not locally, another Reserved follows for another attempt; only without forced_output.
    """

    transfer_id: TransferId
    forced_output: tuple[int, ...]
    stays_remote: bool = False


class TransferAccepted(Message, frozen=True):
    """The peer has reserved blocks for the whole prompt."""

    transfer_id: TransferId


class AskLoad(Message, frozen=True):
    """Answered by LoadReport with the same number; check_integrity walks every table first."""

    number: int
    check_integrity: bool = False


class AskRounds(Message, frozen=True):
    """Answered by RoundsReport with the same number. after: the newest round that the asker knows of, None for none.

    most: of the rounds since, the last so many.
    """

    number: int
    after: int | None
    most: int


class Ping(Message, frozen=True):
    """Answered by Pong between two rounds: a loop that stands still, or is in a long forward, does not answer."""


class Wake(Message, frozen=True):
    """Every rank of the group gets it: go round until all have nothing to do. number: one more each time."""

    number: int


class Stop(Message, frozen=True):
    """Leave the loop; nothing is owed to anybody any more."""


ToRank = Submit | Abort | GiveUpTransfer | TransferAccepted | AskLoad | AskRounds | Ping | Wake | Stop

# ---------------------------------------------------------------- loop → front


class Loading(Message, frozen=True):
    """Start-up goes on: done of total, in the stage's own units (total 0 = unknown)."""

    stage: str
    done: int
    total: int


# Steps in which a rank waits for the others of its group.
JOINING, WARMING_UP = "finding the other ranks", "warming up"


class StartFailed(Message, frozen=True):
    """The rank cannot start; message is one line that ends with the remedy."""

    message: str


class Ready(Message, frozen=True):
    """A real forward has been run. transport_metadata: what peers need to read from this rank, if it has a transport.

    fingerprint: the fields of kv.layout.Fingerprint, of this rank's blocks. longest_chunk_s: the longest forward of a
    whole round's prompt tokens.
    """

    num_blocks: int
    block_bytes: int
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    fingerprint: Fingerprint
    transport_metadata: bytes
    longest_chunk_s: float = 0.0


class Output(Message, frozen=True):
    """What one round added to one answer. error_*: it ended without an answer. num_chunks: announced so far."""

    request_id: RequestId
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    matched_stop_token: int | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    num_chunks: int = 0
    error_name: str = ""
    error_message: str = ""


class Outputs(Message, frozen=True):
    """All outputs of one round."""

    outputs: list[Output]


class Reserved(Message, frozen=True):
    """Blocks are taken for a prompt that a peer is to prefill: the transfer may begin."""

    request_id: RequestId
    transfer_id: TransferId
    num_cached_tokens: int


class ReservationTakenBack(Message, frozen=True):
    """Answers under way needed the blocks: the transfer is over, another Reserved follows when there is room."""

    request_id: RequestId
    transfer_id: TransferId


class LoadReport(Message, frozen=True):
    """integrity: empty, or what check_integrity found."""

    number: int
    load: RankLoad
    integrity: str = ""


class RoundsReport(Message, frozen=True):
    """The last rounds; num_lost more came since the one that was asked for. newest, unix_offset_us: see RankRounds."""

    number: int
    newest: int
    rounds: tuple[Round, ...]
    num_lost: int
    unix_offset_us: int


class Pong(Message, frozen=True):
    """The loop goes round. num_tokens_computed: of prompts, since its start. longest_round_s: see engine/pace.py."""

    num_tokens_computed: int
    longest_round_s: float = 0.0


class AskForWake(Message, frozen=True):
    """This rank sleeps and has something to do: wake the whole group."""


FromRank = (
    Loading
    | StartFailed
    | Ready
    | Outputs
    | Reserved
    | ReservationTakenBack
    | LoadReport
    | RoundsReport
    | Pong
    | AskForWake
)

# ---------------------------------------------------------------- front → transport thread


class ConnectPeer(Message, frozen=True):
    """Learn the memory of one rank of a peer; answered by PeerConnected or PeerUnusable.

    block_map: what is read of its blocks, where it splits the heads over ranks otherwise than we do.
    """

    peer: PeerId
    metadata: bytes
    block_map: BlockMap | None = None


class DropPeer(Message, frozen=True):
    """That life of the peer is over."""

    peer: PeerId


class ExpectPeer(Message, frozen=True):
    """A peer is about to connect to this rank, which has to answer quickly then."""


class PullChunk(Message, frozen=True):
    """A rank of the peer announced prompt tokens [first_token, end_token) in `blocks`. block_hashes: one a block, or
    none. sources: the peer's ranks that this one reads from for this transfer, the announcing one among them.
    """

    transfer_id: TransferId
    rank: int
    seq: int
    first_token: int
    end_token: int
    blocks: tuple[BlockId, ...]
    sources: tuple[tuple[int, PeerId], ...]
    block_hashes: tuple[int, ...] = ()


class ConfirmPull(Message, frozen=True):
    """The peer answered the release. first_token: the token it drew after the prompt."""

    transfer_id: TransferId
    valid: bool
    first_token: int


class RenewLease(Message, frozen=True):
    lease_id: LeaseId


class ReleaseLease(Message, frozen=True):
    """The reader is done; answered by LeaseAnswer."""

    lease_id: LeaseId


class RevokeLease(Message, frozen=True):
    """The reader is gone, or the request is."""

    lease_id: LeaseId
    reason: str


ToTransport = ConnectPeer | DropPeer | ExpectPeer | PullChunk | ConfirmPull | RenewLease | ReleaseLease | RevokeLease

# ---------------------------------------------------------------- transport thread → front


class PeerConnected(Message, frozen=True):
    peer: PeerId


class PeerUnusable(Message, frozen=True):
    """It could not be connected, or it was lost."""

    peer: PeerId
    reason: str


class PullAdvanced(Message, frozen=True):
    """A chunk is here, and not the last of those that were announced."""

    transfer_id: TransferId


class PullFinished(Message, frozen=True):
    """Every announced byte up to the prompt's end is here: the release may be sent."""

    transfer_id: TransferId
    num_bytes: int
    num_reads: int
    num_descriptors: int
    elapsed_s: float


class PullBroken(Message, frozen=True):
    """The transfer cannot be committed any more."""

    transfer_id: TransferId
    reason: str


class PullCommitted(Message, frozen=True):
    """Confirmed in time: the loop decodes from it."""

    transfer_id: TransferId


class LeaseOpened(Message, frozen=True):
    """Blocks for the whole prompt are reserved under this lease."""

    lease_id: LeaseId


class ChunkAnnounced(Message, frozen=True):
    """These blocks are in the lease table: the peer may be told. block_hashes: one a block, or none."""

    lease_id: LeaseId
    seq: int
    first_token: int
    end_token: int
    blocks: tuple[BlockId, ...]
    block_hashes: tuple[int, ...] = ()


class LeaseAnswer(Message, frozen=True):
    """valid: the blocks were pinned from announcement to now."""

    lease_id: LeaseId
    valid: bool


class LeaseGone(Message, frozen=True):
    """The lease was revoked here."""

    lease_id: LeaseId
    reason: str


FromTransport = (
    PeerConnected
    | PeerUnusable
    | PullAdvanced
    | PullFinished
    | PullBroken
    | PullCommitted
    | LeaseOpened
    | ChunkAnnounced
    | LeaseAnswer
    | LeaseGone
)

# ---------------------------------------------------------------- loop → transport thread


class OpenLease(Message, frozen=True):
    """Blocks for the whole prompt are reserved; the lease bears the id of its request."""

    lease_id: LeaseId


class AnnounceChunk(Message, frozen=True):
    """KV of prompt tokens [first_token, end_token) is written. generations: of the blocks, at this moment."""

    lease_id: LeaseId
    first_token: int
    end_token: int
    blocks: tuple[BlockId, ...]
    generations: tuple[int, ...]


class DropLease(Message, frozen=True):
    """The request was aborted here: revoke, then say so."""

    lease_id: LeaseId


class OpenPull(Message, frozen=True):
    """destinations: where prompt tokens from num_cached_tokens on go."""

    transfer_id: TransferId
    num_cached_tokens: int
    num_prompt_tokens: int
    destinations: tuple[BlockId, ...]


class AbandonPull(Message, frozen=True):
    """Nobody waits for it: post nothing more, say KvQuiet when nothing can write its blocks."""

    transfer_id: TransferId


LoopCommand = OpenLease | AnnounceChunk | DropLease | OpenPull | AbandonPull

# ---------------------------------------------------------------- a rank's leader → its followers


class Step(Message, frozen=True):
    """Compute this round. drawn: what the leader drew in the round before, which had samples.

    starts: slots that belong to other requests from now on, before the rows.
    """

    round_id: int
    drawn: tuple[int, ...]
    starts: tuple[tuple[SlotStart, TokenRequest], ...]
    prefill: tuple[Row, ...]
    decode: tuple[Row, ...]


class IdleStep(Message, frozen=True):
    """Take part in a round in which this rank has no rows."""


class Relay(Message, frozen=True):
    """For the follower's transport thread, which does with its part of each block what the leader's does."""

    command: LoopCommand


FromLeader = Step | IdleStep | Relay

# ---------------------------------------------------------------- a follower → its leader


class SawReceived(Message, frozen=True):
    event: KvReceived


class SawQuiet(Message, frozen=True):
    event: KvQuiet


class SawReleased(Message, frozen=True):
    event: LeaseReleased


class SawRevoked(Message, frozen=True):
    event: LeaseRevoked


ToLeader = SawReceived | SawQuiet | SawReleased | SawRevoked

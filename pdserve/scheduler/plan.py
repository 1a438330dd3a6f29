"""What the scheduler hands out, what it is told, and what it answers: plans, events, outcomes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdserve.errors import PdserveError
from pdserve.request import FUSED, BlockId, FinishReason, RequestId, Route, TransferId
from pdserve.scheduler.storage_plan import Fetch, StorageLate, StorageReady, Store, Stored

# ---------------------------------------------------------------- in


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as the scheduler needs it.

    stop_token_ids: end the answer once min_new_tokens are out; the end-of-text ids are among them unless the caller
    ignores those. forced_output: answer tokens that exist already. peer_cached_tokens: for a remote decode, how much
    of the prompt the peer holds (whole blocks), so that only the rest is announced. reads_prefix_cache False: every
    prompt token is computed (its log probabilities were asked for). priority: smaller first.
    """

    request_id: RequestId
    prompt: Sequence[int]
    max_new_tokens: int
    route: Route = FUSED
    min_new_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    forced_output: tuple[int, ...] = ()
    peer_cached_tokens: int = 0
    reads_prefix_cache: bool = True
    priority: int = 0


# ---------------------------------------------------------------- plan


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """What the caller allows this round. allow_prefill False holds every gated prefill (spec: the gate)."""

    allow_prefill: bool = True


class Row(NamedTuple):
    """Tokens [start, end) of one request in one forward. A tuple, as hundreds are made each round.

    slot: the request's place in the runner's per-request state. new_blocks: what its block table grew by since
    its last row (the whole table in its first one). samples: token `end` is drawn after this forward.
    """

    request_id: RequestId
    slot: int
    start: int
    end: int
    new_blocks: tuple[BlockId, ...]
    samples: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class SlotStart:
    """A request has its first row in this plan: the runner forgets whoever had the slot and loads this one.

    forced_output: tokens of the answer that exist already (drawn by a peer, or before a failed transfer).
    num_cached_tokens: known tokens whose KV was found in the prefix cache.
    """

    request_id: RequestId
    slot: int
    forced_output: tuple[int, ...] = ()
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Reservation:
    """A request whose prompt is prefilled by a peer got its slot and blocks: KV may now be pulled into them.

    blocks: where prompt tokens from num_cached_tokens on go, in order; the last may be part full.
    """

    request_id: RequestId
    transfer_id: TransferId
    num_cached_tokens: int
    num_prompt_tokens: int
    blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Whole blocks between device and host: device_blocks[i] to or from host_blocks[i]; answered by HostCopyDone."""

    copy_id: int
    is_to_host: bool
    device_blocks: tuple[BlockId, ...]
    host_blocks: tuple[BlockId, ...]


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request that ends without its answer, and why."""

    request_id: RequestId
    error: PdserveError


@dataclass(frozen=True, slots=True)
class TakenBack:
    """A reservation that no peer had accepted yet is undone. Its transfer drains; another Reservation follows."""

    request_id: RequestId
    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class RoundPlan:
    """One round. Prefill rows come before decode rows in the forward.

    failed: requests that had to be given up for want of capacity; they have ended. taken_back: reservations that
    had to make room for answers under way; they wait again, at their old place. copies: done in this order before
    the forward, which reads what they bring and overwrites what they save. write_backs, fetches, stores: beside it.
    """

    round_id: int
    starts: tuple[SlotStart, ...] = ()
    prefill: tuple[Row, ...] = ()
    decode: tuple[Row, ...] = ()
    reservations: tuple[Reservation, ...] = ()
    failed: tuple[RequestFailed, ...] = ()
    taken_back: tuple[TakenBack, ...] = ()
    copies: tuple[HostCopy, ...] = ()
    write_backs: tuple[HostCopy, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    stores: tuple[Store, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        return self.prefill + self.decode

    @property
    def sampled_rows(self) -> tuple[Row, ...]:
        """The rows that draw a token, in the order of StepDone.tokens."""
        return tuple(row for row in self.rows if row.samples)

    @property
    def num_tokens(self) -> int:
        return sum(row.end - row.start for row in self.prefill) + len(self.decode)

    @property
    def num_extends(self) -> int:
        return len(self.prefill)

    @property
    def batch_size(self) -> int:
        return len(self.prefill) + len(self.decode)

    @property
    def has_moves(self) -> bool:
        """It changed what the next plan may hold, whether or not it has rows."""
        return bool(self.failed or self.reservations or self.taken_back or self.copies)


@dataclass(frozen=True, slots=True)
class PrefillProbe:
    """A rank's wish for a prefill round and what such a round would delay (spec: the probe).

    vote: what is published to the group: the wish, once what waits is worth a round (spec: the fill condition).
    """

    wants_prefill: bool
    has_decode_work: bool
    vote: bool


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class StepDone:
    """The forward of `round_id` is done; tokens are aligned with RoundPlan.sampled_rows."""

    round_id: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class KvAccepted:
    """The peer has reserved blocks for the whole prompt: from now on the transfer will end by itself."""

    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class KvReceived:
    """Every range arrived and the peer confirmed it. first_token: the token the peer drew after the prompt."""

    transfer_id: TransferId
    first_token: int


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """The KV will not come. forced_output: tokens the client has been sent already.

    stays_remote: a peer is to try again, which makes sense only while the client has been sent nothing.
    """

    transfer_id: TransferId
    forced_output: tuple[int, ...] = ()
    stays_remote: bool = False


@dataclass(frozen=True, slots=True)
class KvQuiet:
    """Nothing can write the transfer's destination blocks any more."""

    transfer_id: TransferId


@dataclass(frozen=True, slots=True)
class HostCopyDone:
    """The blocks of the copy are in place."""

    copy_id: int


@dataclass(frozen=True, slots=True)
class LeaseReleased:
    """The peer that read this request's blocks is done with them."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class LeaseRevoked:
    """The lease on this request's blocks will never answer true again."""

    request_id: RequestId


Event = (
    StepDone
    | KvAccepted
    | KvReceived
    | TransferFailed
    | KvQuiet
    | HostCopyDone
    | StorageReady
    | StorageLate
    | Stored
    | LeaseReleased
    | LeaseRevoked
)

# ---------------------------------------------------------------- outcomes


class TokenDrawn(NamedTuple):
    """A token of a live request's answer, and the end of the answer if this was the last. A tuple, as Row is.

    sample: index in StepDone.tokens, so that logprobs can be found beside it.
    """

    request_id: RequestId
    token: int
    sample: int
    finish: FinishReason | None = None
    matched_stop_token: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerEnded:
    """A token drawn elsewhere was the last of the answer; nothing of it is drawn here."""

    request_id: RequestId
    finish: FinishReason
    matched_stop_token: int | None = None


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """Prompt tokens [first_token, end_token) of a request whose decode is remote lie in `blocks`.

    Whole blocks, but for the last block of the prompt. generations: of the blocks, as the pool gave them out.
    """

    request_id: RequestId
    first_token: int
    end_token: int
    blocks: tuple[BlockId, ...]
    generations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RequestAborted:
    """A request ended because it was told to; what it holds may take longer to settle."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class LeaseUnwanted:
    """A request with a lease was aborted: the lease must be revoked before its blocks can go."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class TransferUnwanted:
    """Nobody waits for this transfer any more: stop pulling, say when it is quiet."""

    transfer_id: TransferId


Outcome = TokenDrawn | AnswerEnded | ChunkComputed | RequestAborted | RequestFailed | LeaseUnwanted | TransferUnwanted

"""What a decode node (D) and a prefill node (P) say to each other about one prompt.

D → P  Start        P → D  Queued | Computing (progress)
D → P  Renew        P → D  Accepted
D → P  Release      P → D  ChunkReady
                    P → D  FirstToken
                    P → D  Released
either side  HandoffAbort; the end of the stream is one too
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.kv.layout import Fingerprint
from pdserve.request import BlockId, FinishReason, LeaseId, RequestId, SamplingParams, TokenLogprobs

# Raised by a change that the other side has to know of; the oldest is the last one that can still be spoken with.
PROTOCOL_VERSION = 1
MIN_PROTOCOL_VERSION = 1


# A rank in a forward says nothing. Whoever waits for its next word waits at least so many of its longest chunks.
MIN_CHUNKS = 3


def life_s(lease_s: float, longest_chunk_s: float) -> float:
    """How long a rank's loop may say nothing and still count as alive: a long forward is no standstill."""
    return max(lease_s / 3, MIN_CHUNKS * longest_chunk_s)


def protocol_difference(newest: int, oldest: int) -> str | None:
    """What is wrong with a node that speaks versions [oldest, newest]; nothing where one of them is ours too."""
    if oldest <= PROTOCOL_VERSION and newest >= MIN_PROTOCOL_VERSION:
        return None
    return (
        f"protocol_version: {MIN_PROTOCOL_VERSION} to {PROTOCOL_VERSION} here, {oldest} to {newest} there; "
        "install versions of pdserve that share one"
    )


@dataclass(frozen=True, slots=True)
class Description:
    """A prefill node: who it is, and what its memory looks like.

    incarnation: another one after each start. rank_metadata: what a transport needs to read from each process,
    data-parallel rank by data-parallel rank. num_blocks, num_slots: of one rank. longest_chunk_s: of its forwards
    lately, of its warm-up at first. kv_checksum: its chunks come with a hash a block.
    """

    incarnation: str
    version: str
    fingerprint: Fingerprint
    weights_version: int
    num_blocks: int
    block_bytes: int
    rank_metadata: tuple[bytes, ...]
    max_prompt_tokens: int
    num_slots: int
    lease_s: float
    longest_chunk_s: float = 0.0
    kv_checksum: bool = False
    protocol_version: int = PROTOCOL_VERSION
    min_protocol_version: int = MIN_PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """num_queued_tokens: of prompts P took on and has not computed, a data-parallel rank on average.

    num_free_blocks: not taken by them, of the rank that has most.
    """

    num_queued_tokens: int
    num_free_blocks: int


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Names one attempt of one request; a retry is a new attempt."""

    decode_incarnation: str
    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class Start:
    """incarnation: the P that D described. num_cached_tokens: on D, whole blocks. time_left_s: of the deadline.

    priority: smaller goes first.
    """

    incarnation: str
    request_key: RequestKey
    weights_version: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    num_cached_tokens: int
    fingerprint: Fingerprint
    time_left_s: float | None = None
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Renew:
    """D's rank is alive and still wants the lease."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class Release:
    """The last read of every rank is done."""

    lease_id: LeaseId


@dataclass(frozen=True, slots=True)
class HandoffAbort:
    """The sender gives the handoff up."""

    reason: str


@dataclass(frozen=True, slots=True)
class Queued:
    """num_ahead: requests before this one. rank_tokens_computed: of any prompt, by P's rank since its start."""

    num_ahead: int
    rank_tokens_computed: int = 0


@dataclass(frozen=True, slots=True)
class Computing:
    """num_tokens_done: of the prompt. rank_tokens_computed: of any prompt, by P's rank since its start."""

    num_tokens_done: int
    rank_tokens_computed: int = 0


@dataclass(frozen=True, slots=True)
class Accepted:
    """Blocks for the whole prompt are reserved in the `num_ranks` processes of one of P's data-parallel ranks."""

    lease_id: LeaseId
    num_ranks: int


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """Prompt tokens [first_token, end_token) lie in these blocks of `rank`. seq counts a rank's chunks from 0.

    block_hashes: one a block (see transfer/checksum.py), or none.
    """

    rank: int
    seq: int
    first_token: int
    end_token: int
    blocks: tuple[BlockId, ...]
    block_hashes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The token drawn after the prompt, and the end of the answer if it is the last.

    num_chunks: sent by each rank. num_cached_tokens: prompt tokens that P did not compute.
    """

    token_id: int
    num_chunks: int
    num_cached_tokens: int = 0
    logprobs: TokenLogprobs | None = None
    finish: FinishReason | None = None
    matched_stop_token: int | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class Released:
    """is_valid: the blocks were pinned from their announcement to the Release."""

    is_valid: bool


Progress = Queued | Computing
ToPrefill = Start | Renew | Release | HandoffAbort
ToDecode = Progress | Accepted | ChunkReady | FirstToken | Released | HandoffAbort

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


@dataclass(frozen=True, slots=True)
class Description:
    """A prefill node: who it is, and what its memory looks like.

    incarnation: another one after each start. rank_metadata: what a transport needs to read from each rank.
    num_blocks, num_slots: of one rank.
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


@dataclass(frozen=True, slots=True)
class RequestKey:
    """Names one attempt of one request; a retry is a new attempt."""

    decode_incarnation: str
    request_id: RequestId
    attempt: int


@dataclass(frozen=True, slots=True)
class Start:
    """incarnation: the P that D described. num_cached_tokens: on D, whole blocks. time_left_s: of the deadline."""

    incarnation: str
    request_key: RequestKey
    weights_version: int
    prompt: tuple[int, ...]
    sampling: SamplingParams
    num_cached_tokens: int
    fingerprint: Fingerprint
    time_left_s: float | None = None


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
    """num_ahead: requests before this one."""

    num_ahead: int


@dataclass(frozen=True, slots=True)
class Computing:
    """num_tokens_done: of the prompt."""

    num_tokens_done: int


@dataclass(frozen=True, slots=True)
class Accepted:
    """Blocks for the whole prompt are reserved on `num_ranks` ranks of P."""

    lease_id: LeaseId
    num_ranks: int


@dataclass(frozen=True, slots=True)
class ChunkReady:
    """Prompt tokens [first_token, end_token) lie in these blocks of `rank`. seq counts a rank's chunks from 0."""

    rank: int
    seq: int
    first_token: int
    end_token: int
    blocks: tuple[BlockId, ...]


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


ToPrefill = Start | Renew | Release | HandoffAbort
ToDecode = Queued | Computing | Accepted | ChunkReady | FirstToken | Released | HandoffAbort

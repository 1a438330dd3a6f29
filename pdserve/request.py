"""What a request is, from the front door to the scheduler. Standard library only."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NewType

RequestId = NewType("RequestId", str)
LeaseId = NewType("LeaseId", str)
TransferId = NewType("TransferId", int)
BlockId = NewType("BlockId", int)
BlockHash = NewType("BlockHash", bytes)


class Side(enum.Enum):
    LOCAL = "local"
    REMOTE = "remote"


@dataclass(frozen=True, slots=True)
class Route:
    """Where a request's prefill and decode run. Whatever differs between routes is a property here."""

    prefill: Side = Side.LOCAL
    decode: Side = Side.LOCAL

    @property
    def is_gated(self) -> bool:
        """A closed gate holds its prefill; a request with a remote side is never held."""
        return self.prefill is Side.LOCAL and self.decode is Side.LOCAL

    @property
    def reserves_answer(self) -> bool:
        """Admission reserves blocks for the answer too."""
        return self.decode is Side.LOCAL

    @property
    def holds_slot_on_wire(self) -> bool:
        """It keeps its slot while KV is on the wire, since its decode comes after."""
        return self.decode is Side.LOCAL

    @property
    def may_be_retracted(self) -> bool:
        """A peer may read the blocks of a remote decode at any moment."""
        return self.decode is Side.LOCAL

    def limit_tokens(self, max_new_tokens: int) -> int:
        """How many tokens are generated here."""
        return max_new_tokens if self.decode is Side.LOCAL else min(1, max_new_tokens)


FUSED = Route()
PREFILL_ONLY = Route(decode=Side.REMOTE)
DECODE_ONLY = Route(prefill=Side.REMOTE)


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Ranges are checked in `rpc/codec.py`, where the caller's field names are known.

    temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off. num_logprobs None = no logprobs,
    0 = the chosen token's only, k = the k best beside it; prompt_logprobs likewise for the prompt.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    sample_index: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position: the chosen token's log probability, and the best alternatives, most likely first.

    Taken from the model's logits before any penalty, bias or temperature.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """One answer to compute: what the engine is asked for. A caller's `n` samples are n of these.

    prompt: token ids. priority: smaller goes first, equal keeps the order of arrival. time_left_s: until the caller's
    deadline, as of its arrival; None without one. data_parallel_rank: the one to compute it; None leaves that to the
    node.
    """

    request_id: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    time_left_s: float | None = None
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one answer, in order. The last delta of an answer carries `finish`, and only it.

    num_cached_tokens: prompt tokens that no node had to compute. prompt_logprobs: with the first delta only,
    one entry a prompt token from the second on. placement: where the prompt was prefilled and why, as told in
    trailing metadata (`local;reason=...` or `remote;peer=...`).
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    matched_stop_token: int | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    placement: str = ""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A caller's request after its input was turned into tokens.

    sampling.sample_index is ignored; sample i of n is drawn with index i. stop: strings that end an answer.
    time_left_s: until the caller's deadline, as of now; None without one. data_parallel_rank: as in TokenRequest.
    """

    request_id: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingParams
    num_samples: int = 1
    stop: tuple[str, ...] = ()
    skip_special_tokens: bool = True
    priority: int = 0
    time_left_s: float | None = None
    data_parallel_rank: int | None = None


@dataclass(frozen=True, slots=True)
class GenerateChunk:
    """A piece of one sample's answer as the caller sees it: a token delta and the text it adds.

    text lags behind the tokens while a stop string or an unfinished character may still be in the making.
    matched_stop: the stop string or the id of the stop token that ended the sample.
    """

    index: int
    delta: TokenDelta
    text: str
    num_output_tokens: int
    matched_stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class RankLoad:
    """What one rank has on its hands."""

    rank: int
    num_running: int
    num_waiting: int
    num_waiting_uncached_tokens: int
    num_blocks: int
    num_held_blocks: int
    num_cached_blocks: int
    num_quarantined_blocks: int = 0
    num_live_leases: int = 0
    num_open_transfers: int = 0
    counters: dict[str, int] = field(default_factory=dict)

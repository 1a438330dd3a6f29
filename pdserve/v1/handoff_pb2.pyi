from pdserve.v1 import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Fingerprint(_message.Message):
    __slots__ = ("layout_version", "architecture", "model_revision", "dtype", "block_size", "num_layers", "num_kv_heads", "head_dim", "vocab_size", "tensor_parallel_size")
    LAYOUT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_SIZE_FIELD_NUMBER: _ClassVar[int]
    layout_version: int
    architecture: str
    model_revision: str
    dtype: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tensor_parallel_size: int
    def __init__(self, layout_version: _Optional[int] = ..., architecture: _Optional[str] = ..., model_revision: _Optional[str] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., vocab_size: _Optional[int] = ..., tensor_parallel_size: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("known_incarnation", "protocol_version", "min_protocol_version")
    KNOWN_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MIN_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    known_incarnation: str
    protocol_version: int
    min_protocol_version: int
    def __init__(self, known_incarnation: _Optional[str] = ..., protocol_version: _Optional[int] = ..., min_protocol_version: _Optional[int] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("incarnation", "version", "fingerprint", "weights_version", "num_blocks", "block_bytes", "rank_metadata", "max_prompt_tokens", "num_slots", "lease_s", "protocol_version", "min_protocol_version", "longest_chunk_s", "kv_checksum", "load")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    RANK_METADATA_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MIN_PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LONGEST_CHUNK_S_FIELD_NUMBER: _ClassVar[int]
    KV_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    version: str
    fingerprint: Fingerprint
    weights_version: int
    num_blocks: int
    block_bytes: int
    rank_metadata: _containers.RepeatedScalarFieldContainer[bytes]
    max_prompt_tokens: int
    num_slots: int
    lease_s: float
    protocol_version: int
    min_protocol_version: int
    longest_chunk_s: float
    kv_checksum: bool
    load: Load
    def __init__(self, incarnation: _Optional[str] = ..., version: _Optional[str] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., weights_version: _Optional[int] = ..., num_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., rank_metadata: _Optional[_Iterable[bytes]] = ..., max_prompt_tokens: _Optional[int] = ..., num_slots: _Optional[int] = ..., lease_s: _Optional[float] = ..., protocol_version: _Optional[int] = ..., min_protocol_version: _Optional[int] = ..., longest_chunk_s: _Optional[float] = ..., kv_checksum: _Optional[bool] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("queued_tokens", "free_blocks")
    QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    queued_tokens: int
    free_blocks: int
    def __init__(self, queued_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ...) -> None: ...

class RequestKey(_message.Message):
    __slots__ = ("decode_incarnation", "request_id", "attempt")
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    decode_incarnation: str
    request_id: str
    attempt: int
    def __init__(self, decode_incarnation: _Optional[str] = ..., request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class LogitBias(_message.Message):
    __slots__ = ("token_id", "bias")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    bias: float
    def __init__(self, token_id: _Optional[int] = ..., bias: _Optional[float] = ...) -> None: ...

class ResolvedSampling(_message.Message):
    __slots__ = ("max_new_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "stop_token_ids", "ignore_eos", "seed", "sample_index", "logit_bias", "num_logprobs", "prompt_logprobs")
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MIN_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    max_new_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    min_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    seed: int
    sample_index: int
    logit_bias: _containers.RepeatedCompositeFieldContainer[LogitBias]
    num_logprobs: int
    prompt_logprobs: int
    def __init__(self, max_new_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., min_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., seed: _Optional[int] = ..., sample_index: _Optional[int] = ..., logit_bias: _Optional[_Iterable[_Union[LogitBias, _Mapping]]] = ..., num_logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("incarnation", "request_key", "weights_version", "token_ids", "sampling", "num_cached_tokens", "fingerprint", "time_left_s", "priority")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REQUEST_KEY_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_S_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    request_key: RequestKey
    weights_version: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: ResolvedSampling
    num_cached_tokens: int
    fingerprint: Fingerprint
    time_left_s: float
    priority: int
    def __init__(self, incarnation: _Optional[str] = ..., request_key: _Optional[_Union[RequestKey, _Mapping]] = ..., weights_version: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[ResolvedSampling, _Mapping]] = ..., num_cached_tokens: _Optional[int] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., time_left_s: _Optional[float] = ..., priority: _Optional[int] = ...) -> None: ...

class Renew(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class HandoffAbort(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("start", "renew", "release", "abort")
    START_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    start: Start
    renew: Renew
    release: Release
    abort: HandoffAbort
    def __init__(self, start: _Optional[_Union[Start, _Mapping]] = ..., renew: _Optional[_Union[Renew, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., abort: _Optional[_Union[HandoffAbort, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("queued_ahead", "tokens_done", "rank_tokens_computed")
    QUEUED_AHEAD_FIELD_NUMBER: _ClassVar[int]
    TOKENS_DONE_FIELD_NUMBER: _ClassVar[int]
    RANK_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    queued_ahead: int
    tokens_done: int
    rank_tokens_computed: int
    def __init__(self, queued_ahead: _Optional[int] = ..., tokens_done: _Optional[int] = ..., rank_tokens_computed: _Optional[int] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("lease_id", "ranks")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    ranks: int
    def __init__(self, lease_id: _Optional[str] = ..., ranks: _Optional[int] = ...) -> None: ...

class ChunkReady(_message.Message):
    __slots__ = ("rank", "seq", "first_token", "end_token", "block_ids", "block_hashes")
    RANK_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    seq: int
    first_token: int
    end_token: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, rank: _Optional[int] = ..., seq: _Optional[int] = ..., first_token: _Optional[int] = ..., end_token: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., block_hashes: _Optional[_Iterable[int]] = ...) -> None: ...

class FirstToken(_message.Message):
    __slots__ = ("token_id", "logprobs", "finish_reason", "matched_stop_token", "prompt_logprobs", "num_chunks", "num_cached_tokens")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    MATCHED_STOP_TOKEN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprobs: _inference_pb2.PositionLogprobs
    finish_reason: _inference_pb2.FinishReason
    matched_stop_token: int
    prompt_logprobs: _inference_pb2.PromptLogprobs
    num_chunks: int
    num_cached_tokens: int
    def __init__(self, token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_inference_pb2.PositionLogprobs, _Mapping]] = ..., finish_reason: _Optional[_Union[_inference_pb2.FinishReason, str]] = ..., matched_stop_token: _Optional[int] = ..., prompt_logprobs: _Optional[_Union[_inference_pb2.PromptLogprobs, _Mapping]] = ..., num_chunks: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class Released(_message.Message):
    __slots__ = ("valid",)
    VALID_FIELD_NUMBER: _ClassVar[int]
    valid: bool
    def __init__(self, valid: _Optional[bool] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("progress", "accepted", "chunk_ready", "first_token", "released", "abort", "load")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_READY_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    progress: Progress
    accepted: Accepted
    chunk_ready: ChunkReady
    first_token: FirstToken
    released: Released
    abort: HandoffAbort
    load: Load
    def __init__(self, progress: _Optional[_Union[Progress, _Mapping]] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., chunk_ready: _Optional[_Union[ChunkReady, _Mapping]] = ..., first_token: _Optional[_Union[FirstToken, _Mapping]] = ..., released: _Optional[_Union[Released, _Mapping]] = ..., abort: _Optional[_Union[HandoffAbort, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ...) -> None: ...

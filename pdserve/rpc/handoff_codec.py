"""Between the Handoff protos and `rpc/handoff.py`.

Decoding checks what a message says by itself and raises ProtocolError; order, ids and ranges that depend on what was
said before are the caller's to check.
"""

from __future__ import annotations

import math
from dataclasses import asdict, fields
from typing import Any

from pdserve.errors import InvalidRequest, PeerMismatch, ProtocolError
from pdserve.kv.layout import Fingerprint
from pdserve.request import BlockId, LeaseId, RequestId, SamplingParams
from pdserve.rpc.codec import (
    decode_finish,
    decode_logprobs,
    decode_prompt_logprobs,
    encode_finish,
    encode_logprobs,
    encode_prompt_logprobs,
)
from pdserve.rpc.handoff import (
    MIN_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Accepted,
    ChunkReady,
    Computing,
    Description,
    FirstToken,
    HandoffAbort,
    PeerLoad,
    Queued,
    Release,
    Released,
    Renew,
    RequestKey,
    Start,
    ToDecode,
    ToPrefill,
    protocol_difference,
)
from pdserve.rpc.sampling import check_ranges, check_token_id, check_vocabulary, quoted
from pdserve.v1 import handoff_pb2 as pb

OPTIONAL_SAMPLING = ("num_logprobs", "prompt_logprobs")

# ---------------------------------------------------------------- describe


def encode_describe(known_incarnation: str = "") -> pb.DescribeRequest:
    """Ask a prefill node who it is. known_incarnation: the life of it that one is connected to."""
    return pb.DescribeRequest(
        known_incarnation=known_incarnation,
        protocol_version=PROTOCOL_VERSION,
        min_protocol_version=MIN_PROTOCOL_VERSION,
    )


def check_protocol(message: pb.DescribeRequest | pb.DescribeResponse) -> None:
    """Raises PeerMismatch where there is no version of the protocol that both nodes speak."""
    difference = protocol_difference(message.protocol_version, message.min_protocol_version)
    if difference is not None:
        raise PeerMismatch(difference)


def encode_description(description: Description) -> pb.DescribeResponse:
    values = {f.name: getattr(description, f.name) for f in fields(Description)}
    return pb.DescribeResponse(**(values | {"fingerprint": encode_fingerprint(description.fingerprint)}))


def decode_description(message: pb.DescribeResponse) -> Description:
    """Raises PeerMismatch for a protocol that is not ours, ProtocolError for what no node would say."""
    check_protocol(message)
    _require_text("incarnation", message.incarnation)
    if not message.rank_metadata:
        raise ProtocolError("rank_metadata is empty, the peer has no rank to read from")
    if not (math.isfinite(message.lease_s) and message.lease_s > 0):
        raise ProtocolError(f"lease_s is {message.lease_s}, it must be finite and above 0")
    if not (math.isfinite(message.longest_chunk_s) and message.longest_chunk_s >= 0):
        raise ProtocolError(f"longest_chunk_s is {message.longest_chunk_s}, it must be finite and at least 0")
    values: dict[str, Any] = {f.name: getattr(message, f.name) for f in fields(Description)}
    values |= {
        "fingerprint": decode_fingerprint(message.fingerprint),
        "rank_metadata": tuple(message.rank_metadata),
    }
    return Description(**values)


def encode_load(load: PeerLoad) -> pb.Load:
    return pb.Load(queued_tokens=load.num_queued_tokens, free_blocks=load.num_free_blocks)


def decode_load(message: pb.DescribeResponse | pb.PrefillResponse) -> PeerLoad | None:
    """What the message says of its sender's load beside anything else; None where it says nothing."""
    if not message.HasField("load"):
        return None
    return PeerLoad(message.load.queued_tokens, message.load.free_blocks)


def encode_fingerprint(fingerprint: Fingerprint) -> pb.Fingerprint:
    return pb.Fingerprint(**asdict(fingerprint))


def decode_fingerprint(message: pb.Fingerprint) -> Fingerprint:
    return Fingerprint(**{f.name: getattr(message, f.name) for f in fields(Fingerprint)})


# ---------------------------------------------------------------- D → P


def encode_to_prefill(said: ToPrefill) -> pb.PrefillRequest:
    match said:
        case Start():
            return pb.PrefillRequest(start=_encode_start(said))
        case Renew():
            return pb.PrefillRequest(renew=pb.Renew(lease_id=said.lease_id))
        case Release():
            return pb.PrefillRequest(release=pb.Release(lease_id=said.lease_id))
        case HandoffAbort():
            return pb.PrefillRequest(abort=pb.HandoffAbort(reason=said.reason))


def decode_to_prefill(message: pb.PrefillRequest) -> ToPrefill:
    """Raises ProtocolError."""
    match message.WhichOneof("kind"):
        case "start":
            return _decode_start(message.start)
        case "renew":
            return Renew(_lease_id(message.renew.lease_id))
        case "release":
            return Release(_lease_id(message.release.lease_id))
        case "abort":
            return HandoffAbort(message.abort.reason)
        case _:
            raise ProtocolError("a message to the prefill node of no known kind; both nodes need the same version")


def _encode_start(start: Start) -> pb.Start:
    return pb.Start(
        incarnation=start.incarnation,
        request_key=pb.RequestKey(**asdict(start.request_key)),
        weights_version=start.weights_version,
        token_ids=start.prompt,
        sampling=encode_resolved(start.sampling),
        num_cached_tokens=start.num_cached_tokens,
        fingerprint=encode_fingerprint(start.fingerprint),
        time_left_s=start.time_left_s,
        priority=start.priority,
    )


def _decode_start(message: pb.Start) -> Start:
    key = message.request_key
    _require_text("incarnation", message.incarnation)
    _require_text("request_key.decode_incarnation", key.decode_incarnation)
    _require_text("request_key.request_id", key.request_id)
    fingerprint = decode_fingerprint(message.fingerprint)
    time_left_s = message.time_left_s if message.HasField("time_left_s") else None
    if time_left_s is not None and not math.isfinite(time_left_s):
        raise ProtocolError(f"time_left_s is {time_left_s}, it must be finite")
    return Start(
        incarnation=message.incarnation,
        request_key=RequestKey(key.decode_incarnation, RequestId(key.request_id), key.attempt),
        weights_version=message.weights_version,
        prompt=_decode_prompt(message, fingerprint),
        sampling=decode_resolved(message.sampling, fingerprint.vocab_size),
        num_cached_tokens=message.num_cached_tokens,
        fingerprint=fingerprint,
        time_left_s=time_left_s,
        priority=message.priority,
    )


def _decode_prompt(message: pb.Start, fingerprint: Fingerprint) -> tuple[int, ...]:
    """The prompt, whose last token at least is P's to compute; the rest starts on a block boundary."""
    num_tokens, num_cached = len(message.token_ids), message.num_cached_tokens
    if num_cached >= num_tokens:
        raise ProtocolError(f"num_cached_tokens is {num_cached} for a prompt of {num_tokens} tokens, it must be less")
    if num_cached % max(1, fingerprint.block_size) != 0:
        raise ProtocolError(f"num_cached_tokens is {num_cached}, no multiple of the block of {fingerprint.block_size}")
    try:
        check_token_id("token_ids", max(message.token_ids), fingerprint.vocab_size)
    except InvalidRequest as error:
        raise ProtocolError(error.message) from error
    return tuple(message.token_ids)


def encode_resolved(sampling: SamplingParams) -> pb.ResolvedSampling:
    """Fields of one name, but for the biases."""
    values: dict[str, Any] = {f.name: getattr(sampling, f.name) for f in fields(SamplingParams)}
    values["logit_bias"] = [pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in sampling.logit_bias]
    return pb.ResolvedSampling(**values)


def decode_resolved(message: pb.ResolvedSampling, vocab_size: int) -> SamplingParams:
    """Raises ProtocolError for values that no caller could have had accepted."""
    values: dict[str, Any] = {f.name: getattr(message, f.name) for f in fields(SamplingParams)}
    values |= {
        "stop_token_ids": tuple(message.stop_token_ids),
        "logit_bias": tuple((entry.token_id, entry.bias) for entry in message.logit_bias),
    }
    values |= {name: None for name in OPTIONAL_SAMPLING if not message.HasField(name)}
    sampling = SamplingParams(**values)
    try:
        check_ranges(sampling)
        check_vocabulary(sampling, vocab_size)
    except InvalidRequest as error:
        raise ProtocolError(f"sampling: {error.message}") from error
    return sampling


# ---------------------------------------------------------------- P → D


def encode_to_decode(said: ToDecode) -> pb.PrefillResponse:
    match said:
        case Queued(num_ahead, computed):
            return pb.PrefillResponse(progress=pb.Progress(queued_ahead=num_ahead, rank_tokens_computed=computed))
        case Computing(num_done, computed):
            return pb.PrefillResponse(progress=pb.Progress(tokens_done=num_done, rank_tokens_computed=computed))
        case Accepted():
            return pb.PrefillResponse(accepted=pb.Accepted(lease_id=said.lease_id, ranks=said.num_ranks))
        case ChunkReady():
            return pb.PrefillResponse(chunk_ready=_encode_chunk(said))
        case FirstToken():
            return pb.PrefillResponse(first_token=_encode_first_token(said))
        case Released():
            return pb.PrefillResponse(released=pb.Released(valid=said.is_valid))
        case HandoffAbort():
            return pb.PrefillResponse(abort=pb.HandoffAbort(reason=said.reason))


def decode_to_decode(message: pb.PrefillResponse) -> ToDecode:
    """Raises ProtocolError."""
    match message.WhichOneof("kind"):
        case "progress":
            return _decode_progress(message.progress)
        case "accepted":
            return _decode_accepted(message.accepted)
        case "chunk_ready":
            return _decode_chunk(message.chunk_ready)
        case "first_token":
            return _decode_first_token(message.first_token)
        case "released":
            return Released(message.released.valid)
        case "abort":
            return HandoffAbort(message.abort.reason)
        case _:
            raise ProtocolError("a message to the decode node of no known kind; both nodes need the same version")


def _decode_progress(message: pb.Progress) -> Queued | Computing:
    match message.WhichOneof("kind"):
        case "queued_ahead":
            return Queued(message.queued_ahead, message.rank_tokens_computed)
        case "tokens_done":
            return Computing(message.tokens_done, message.rank_tokens_computed)
        case _:
            raise ProtocolError("progress of no known kind; both nodes need the same version")


def _decode_accepted(message: pb.Accepted) -> Accepted:
    if message.ranks < 1:
        raise ProtocolError(f"ranks is {message.ranks}, a lease is held by at least 1")
    return Accepted(_lease_id(message.lease_id), message.ranks)


def _encode_chunk(chunk: ChunkReady) -> pb.ChunkReady:
    return pb.ChunkReady(
        rank=chunk.rank,
        seq=chunk.seq,
        first_token=chunk.first_token,
        end_token=chunk.end_token,
        block_ids=chunk.blocks,
        block_hashes=chunk.block_hashes,
    )


def _decode_chunk(message: pb.ChunkReady) -> ChunkReady:
    if message.first_token >= message.end_token:
        raise ProtocolError(f"chunk of tokens [{message.first_token}, {message.end_token}), it must not be empty")
    if not message.block_ids:
        raise ProtocolError(f"chunk of tokens [{message.first_token}, {message.end_token}) names no blocks")
    blocks, hashes = tuple(BlockId(block) for block in message.block_ids), tuple(message.block_hashes)
    if hashes and len(hashes) != len(blocks):
        raise ProtocolError(f"chunk {message.seq} has {len(hashes)} block_hashes for {len(blocks)} blocks")
    return ChunkReady(message.rank, message.seq, message.first_token, message.end_token, blocks, hashes)


def _encode_first_token(first: FirstToken) -> pb.FirstToken:
    return pb.FirstToken(
        token_id=first.token_id,
        logprobs=None if first.logprobs is None else encode_logprobs(first.logprobs),
        finish_reason=encode_finish(first.finish),
        matched_stop_token=first.matched_stop_token,
        prompt_logprobs=None if first.prompt_logprobs is None else encode_prompt_logprobs(first.prompt_logprobs),
        num_chunks=first.num_chunks,
        num_cached_tokens=first.num_cached_tokens,
    )


def _decode_first_token(message: pb.FirstToken) -> FirstToken:
    has_prompt_logprobs = message.HasField("prompt_logprobs")
    return FirstToken(
        token_id=message.token_id,
        num_chunks=message.num_chunks,
        num_cached_tokens=message.num_cached_tokens,
        logprobs=decode_logprobs(message.logprobs) if message.HasField("logprobs") else None,
        finish=decode_finish(message.finish_reason),
        matched_stop_token=message.matched_stop_token if message.HasField("matched_stop_token") else None,
        prompt_logprobs=decode_prompt_logprobs(message.prompt_logprobs) if has_prompt_logprobs else None,
    )


def _lease_id(text: str) -> LeaseId:
    _require_text("lease_id", text)
    return LeaseId(text)


def _require_text(name: str, value: str) -> None:
    if not value:
        raise ProtocolError(f"{name} is {quoted(value)}, the message must name one")

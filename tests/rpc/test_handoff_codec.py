import math
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.errors import PeerMismatch, ProtocolError
from pdserve.kv.layout import Fingerprint
from pdserve.request import BlockId, FinishReason, LeaseId, RequestId, SamplingParams, TokenLogprobs
from pdserve.rpc import handoff
from pdserve.rpc import handoff_codec as codec
from pdserve.rpc.handoff import (
    Accepted,
    ChunkReady,
    Computing,
    Description,
    FirstToken,
    HandoffAbort,
    Queued,
    Release,
    Released,
    Renew,
    RequestKey,
    Start,
)
from pdserve.v1 import handoff_pb2 as pb

VOCAB = 1000
FINGERPRINT = Fingerprint(1, "LlamaForCausalLM", "r1", "float32", 4, 2, 1, 8, VOCAB)
START = Start("p1", RequestKey("d1", RequestId("a"), 0), 3, (1, 2, 3), SamplingParams(4), 0, FINGERPRINT)
DESCRIPTION = Description("p1", "0.1.0", FINGERPRINT, 2, 100, 4096, (b"\x00\xff", b""), 8191, 32, 30.0, 1.5, True, 3, 0)

names = st.text(min_size=1, max_size=12)
counts = st.integers(0, 2**32 - 1)
tokens = st.integers(0, VOCAB - 1)
logprob = st.floats(max_value=0.0, allow_nan=False)
positions = st.builds(TokenLogprobs, tokens, logprob, st.lists(st.tuples(tokens, logprob), max_size=3).map(tuple))
leases = names.map(LeaseId)
samplings = st.builds(
    SamplingParams,
    max_new_tokens=st.integers(1, 2**31 - 1),
    temperature=st.floats(0, 100),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 2**31 - 1),
    min_p=st.floats(0, 1),
    frequency_penalty=st.floats(-2, 2),
    presence_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0, 10, exclude_min=True),
    min_new_tokens=st.integers(0, 2**31 - 1),
    stop_token_ids=st.lists(tokens, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    seed=st.integers(-(2**63), 2**63 - 1),
    sample_index=st.integers(0, 15),
    logit_bias=st.lists(st.tuples(tokens, st.floats(-100, 100)), max_size=3).map(tuple),
    num_logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
)
starts = st.builds(
    Start,
    incarnation=names,
    request_key=st.builds(RequestKey, names, names.map(RequestId), counts),
    weights_version=st.integers(0, 2**64 - 1),
    prompt=st.lists(tokens, min_size=5, max_size=8).map(tuple),
    sampling=samplings,
    num_cached_tokens=st.sampled_from([0, 4]),
    fingerprint=st.just(FINGERPRINT),
    time_left_s=st.none() | st.floats(0, 1e6),
    priority=st.integers(-(2**31), 2**31 - 1),
)
chunks = st.builds(
    ChunkReady,
    rank=counts,
    seq=counts,
    first_token=st.integers(0, 99),
    end_token=st.integers(100, 200),
    blocks=st.lists(counts.map(BlockId), min_size=3, max_size=3).map(tuple),
    block_hashes=st.just(()) | st.tuples(*[st.integers(0, 2**64 - 1)] * 3),
)
first_tokens = st.builds(
    FirstToken,
    token_id=tokens,
    num_chunks=counts,
    num_cached_tokens=counts,
    logprobs=st.none() | positions,
    finish=st.none() | st.sampled_from(FinishReason),
    matched_stop_token=st.none() | tokens,
    prompt_logprobs=st.none() | st.lists(positions, max_size=3).map(tuple),
)
to_prefill = st.one_of(
    starts, st.builds(Renew, leases), st.builds(Release, leases), st.builds(HandoffAbort, st.text(max_size=9))
)
to_decode = st.one_of(
    st.builds(Queued, counts, st.integers(0, 2**64 - 1)),
    st.builds(Computing, counts, st.integers(0, 2**64 - 1)),
    st.builds(Accepted, leases, st.integers(1, 64)),
    chunks,
    first_tokens,
    st.builds(Released, st.booleans()),
    st.builds(HandoffAbort, st.text(max_size=9)),
)


@settings(max_examples=100, deadline=None)
@given(to_prefill)
def test_what_decode_says_survives_the_wire(said: Start | Renew | Release | HandoffAbort) -> None:
    wire = codec.encode_to_prefill(said).SerializeToString()
    assert codec.decode_to_prefill(pb.PrefillRequest.FromString(wire)) == said


@settings(max_examples=100, deadline=None)
@given(to_decode)
def test_what_prefill_says_survives_the_wire(
    said: Queued | Computing | Accepted | ChunkReady | FirstToken | Released | HandoffAbort,
) -> None:
    wire = codec.encode_to_decode(said).SerializeToString()
    assert codec.decode_to_decode(pb.PrefillResponse.FromString(wire)) == said


def test_a_description_survives_the_wire() -> None:
    wire = codec.encode_description(DESCRIPTION).SerializeToString()
    assert codec.decode_description(pb.DescribeResponse.FromString(wire)) == DESCRIPTION


def test_every_field_of_our_types_has_one_on_the_wire() -> None:
    for ours, wire in ((SamplingParams, pb.ResolvedSampling), (Fingerprint, pb.Fingerprint)):
        assert {f.name for f in fields(ours)} == {f.name for f in wire.DESCRIPTOR.fields}


@pytest.mark.parametrize(
    ("start", "text"),
    [
        (replace(START, incarnation=""), "incarnation"),
        (replace(START, request_key=RequestKey("", RequestId("a"), 0)), "decode_incarnation"),
        (replace(START, request_key=RequestKey("d", RequestId(""), 0)), "request_id"),
        (replace(START, prompt=()), "num_cached_tokens is 0 for a prompt of 0 tokens"),
        (replace(START, prompt=(VOCAB,)), "token id 1000, the vocabulary ends at 999"),
        (replace(START, num_cached_tokens=4), "num_cached_tokens is 4 for a prompt of 3 tokens"),
        (replace(START, num_cached_tokens=1), "no multiple of the block of 4"),
        (replace(START, time_left_s=math.nan), "time_left_s"),
        (replace(START, sampling=SamplingParams(4, temperature=math.nan)), "sampling: temperature is nan"),
        (replace(START, sampling=SamplingParams(0)), "sampling: max_new_tokens is 0"),
        (replace(START, sampling=SamplingParams(4, stop_token_ids=(VOCAB,))), "sampling: stop_token_ids"),
    ],
)
def test_a_bad_start_is_a_protocol_error_that_names_the_field(start: Start, text: str) -> None:
    with pytest.raises(ProtocolError, match=text):
        codec.decode_to_prefill(codec.encode_to_prefill(start))


@pytest.mark.parametrize(
    "message",
    [
        pb.PrefillResponse(),
        pb.PrefillResponse(progress=pb.Progress()),
        pb.PrefillResponse(accepted=pb.Accepted(lease_id="", ranks=1)),
        pb.PrefillResponse(accepted=pb.Accepted(lease_id="l", ranks=0)),
        pb.PrefillResponse(chunk_ready=pb.ChunkReady(first_token=5, end_token=5, block_ids=[1])),
        pb.PrefillResponse(chunk_ready=pb.ChunkReady(first_token=0, end_token=5)),
        pb.PrefillResponse(chunk_ready=pb.ChunkReady(end_token=5, block_ids=[1, 2], block_hashes=[1])),
    ],
)
def test_bad_words_of_a_prefill_node_are_protocol_errors(message: pb.PrefillResponse) -> None:
    with pytest.raises(ProtocolError):
        codec.decode_to_decode(message)


@pytest.mark.parametrize("message", [pb.PrefillRequest(), pb.PrefillRequest(renew=pb.Renew())])
def test_bad_words_of_a_decode_node_are_protocol_errors(message: pb.PrefillRequest) -> None:
    with pytest.raises(ProtocolError):
        codec.decode_to_prefill(message)


@pytest.mark.parametrize(
    "description",
    [
        replace(DESCRIPTION, rank_metadata=()),
        replace(DESCRIPTION, lease_s=math.inf),
        replace(DESCRIPTION, longest_chunk_s=math.nan),
        replace(DESCRIPTION, longest_chunk_s=-1.0),
    ],
)
def test_a_bad_description_is_a_protocol_error(description: Description) -> None:
    with pytest.raises(ProtocolError):
        codec.decode_description(codec.encode_description(description))


@pytest.mark.parametrize(("newest", "oldest", "is_spoken"), [(4, 4, True), (9, 4, True), (9, 5, False), (2, 1, False)])
def test_nodes_whose_versions_overlap_speak_and_others_name_them(
    newest: int, oldest: int, is_spoken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handoff, "PROTOCOL_VERSION", 4)
    monkeypatch.setattr(handoff, "MIN_PROTOCOL_VERSION", 3)
    described = codec.encode_description(replace(DESCRIPTION, protocol_version=newest, min_protocol_version=oldest))
    if is_spoken:
        assert codec.decode_description(described).protocol_version == newest
        return
    with pytest.raises(PeerMismatch, match=f"protocol_version: 3 to 4 here, {oldest} to {newest} there"):
        codec.decode_description(described)


def test_a_node_that_names_no_version_is_older_than_all() -> None:
    with pytest.raises(PeerMismatch, match="0 to 0 there"):
        codec.check_protocol(pb.DescribeRequest())
    codec.check_protocol(codec.encode_describe("life-1"))

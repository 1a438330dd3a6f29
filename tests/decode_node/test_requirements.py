"""A peer that does not fit is refused with the field and both values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from decode_node.requirements import MAX_NO_PROGRESS_S, Requirements
from pdserve.kv.layout import Fingerprint
from pdserve.rpc.handoff import Description

FINGERPRINT = Fingerprint(1, "LlamaForCausalLM", "r0", "float32", 16, 2, 2, 16, 288)
PEER = Description("life-1", "0", FINGERPRINT, 0, 8, 1024, (b"",), 512, 4, 30.0)
NODE = Requirements(FINGERPRINT, transfer_timeout_s=60.0)

FITS = {
    "the same": (NODE, PEER),
    "a chunk that took half the deadline": (NODE, replace(PEER, longest_chunk_s=30.0)),
    "hashes on both sides": (replace(NODE, kv_checksum=True), replace(PEER, kv_checksum=True)),
    "hashes that nobody needs": (NODE, replace(PEER, kv_checksum=True)),
}
OTHER_SPLIT = replace(PEER, kv_checksum=True, fingerprint=replace(FINGERPRINT, tensor_parallel_size=2))
DIFFERS = {
    "another model": (
        NODE,
        replace(PEER, fingerprint=replace(FINGERPRINT, model_revision="r1")),
        "model_revision: 'r0' here, 'r1' there",
    ),
    "no hashes": (replace(NODE, kv_checksum=True), PEER, "kv_checksum: True here, False there"),
    "hashes of other shares of a block": (
        replace(NODE, kv_checksum=True),
        OTHER_SPLIT,
        "kv_checksum: True, tensor_parallel_size: 1 here, 2 there",
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_what_fits_is_used(name: str) -> None:
    node, peer = FITS[name]
    assert node.differences(peer) == ()


@pytest.mark.parametrize("name", DIFFERS)
def test_what_does_not_fit_is_named_with_both_values(name: str) -> None:
    node, peer, message = DIFFERS[name]
    (difference,) = node.differences(peer)
    assert message in difference


@pytest.mark.parametrize(
    ("longest_chunk_s", "no_progress_s"),
    [(0.0, 60.0), (20.0, 60.0), (28.2, 84.6), (1e6, MAX_NO_PROGRESS_S)],
    ids=["unknown", "short", "long", "absurd"],
)
def test_a_peer_is_waited_for_as_long_as_three_of_its_chunks_take_and_not_for_ever(
    longest_chunk_s: float, no_progress_s: float
) -> None:
    assert NODE.no_progress_s(longest_chunk_s) == pytest.approx(no_progress_s)


def test_what_a_person_set_is_never_shortened() -> None:
    assert replace(NODE, transfer_timeout_s=3600.0).no_progress_s(1e6) == 3600.0

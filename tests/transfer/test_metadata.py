"""Metadata is a peer's word: nothing of it is believed before it was checked."""

from __future__ import annotations

import msgspec
import pytest

from pdserve.errors import PeerMismatch, ProtocolError
from pdserve.transfer.metadata import SlabMetadata, decode_metadata

GOOD = SlabMetadata(agent=b"agent", base=1 << 40, num_blocks=8, block_bytes=64)


def test_what_was_encoded_is_decoded() -> None:
    assert decode_metadata(GOOD.encode(), block_bytes=64) == GOOD


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "transfer metadata version: 1 here, 2 there"),
        ({"num_blocks": 0}, "transfer metadata: num_blocks 0, base 1099511627776"),
        ({"base": -1}, "transfer metadata: num_blocks 8, base -1"),
    ],
)
def test_values_that_cannot_be_are_refused_by_name(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ProtocolError) as raised:
        decode_metadata(msgspec.structs.replace(GOOD, **changes).encode(), block_bytes=64)
    assert raised.value.message == message


@pytest.mark.parametrize("cut", range(0, len(GOOD.encode()), 7))
def test_every_truncation_is_refused(cut: int) -> None:
    with pytest.raises(ProtocolError, match=f"transfer metadata of {cut} bytes cannot be read"):
        decode_metadata(GOOD.encode()[:cut], block_bytes=64)


def test_blocks_of_another_size_are_a_mismatch_that_names_both() -> None:
    with pytest.raises(PeerMismatch, match="block_bytes: 128 here, 64 there"):
        decode_metadata(GOOD.encode(), block_bytes=128)

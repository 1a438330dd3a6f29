"""What a node tells its peers about its slab, so that they can read from it."""

from __future__ import annotations

import msgspec

from pdserve.errors import PeerMismatch, ProtocolError

METADATA_VERSION = 1


class SlabMetadata(msgspec.Struct, frozen=True):
    """One rank's slab [num_blocks, block_bytes] at address `base` of its process.

    agent: what the transport itself needs to find the owner. device_id: 0 for host memory.
    """

    agent: bytes
    base: int
    num_blocks: int
    block_bytes: int
    device_id: int = 0
    version: int = METADATA_VERSION

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def decode_metadata(encoded: bytes, *, block_bytes: int) -> SlabMetadata:
    """A peer's metadata, fit to be read by a node that expects its blocks to take `block_bytes`.

    Raises ProtocolError when it is not metadata of this version, PeerMismatch when the blocks differ in size.
    """
    try:
        metadata = msgspec.msgpack.decode(encoded, type=SlabMetadata)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ProtocolError(f"transfer metadata of {len(encoded)} bytes cannot be read: {error}") from None
    if metadata.version != METADATA_VERSION:
        raise ProtocolError(f"transfer metadata version: {METADATA_VERSION} here, {metadata.version} there")
    if metadata.num_blocks < 1 or metadata.base < 0:
        raise ProtocolError(f"transfer metadata: num_blocks {metadata.num_blocks}, base {metadata.base}")
    if metadata.block_bytes != block_bytes:
        raise PeerMismatch(f"block_bytes: {block_bytes} here, {metadata.block_bytes} there")
    return metadata

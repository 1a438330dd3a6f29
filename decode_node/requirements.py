"""What a prefill node has to be before prompts are sent there; told apart field by field."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.kv.layout import Fingerprint
from pdserve.rpc.handoff import MIN_CHUNKS, Description


@dataclass(frozen=True, slots=True)
class Requirements:
    """Of one decode node. transfer_timeout_s: how long a peer may tell nothing new."""

    fingerprint: Fingerprint
    transfer_timeout_s: float
    kv_checksum: bool = False

    def differences(self, peer: Description) -> tuple[str, ...]:
        """One text a field that keeps the two apart, naming the field and both values (ours first)."""
        return (*self.fingerprint.differences(peer.fingerprint), *self._too_impatient(peer), *self._unhashed(peer))

    def _too_impatient(self, peer: Description) -> tuple[str, ...]:
        needed_s = MIN_CHUNKS * peer.longest_chunk_s
        if self.transfer_timeout_s >= needed_s:
            return ()
        return (
            f"transfer_timeout_s: {self.transfer_timeout_s:g} here, the longest chunk took {peer.longest_chunk_s:g} s "
            f"there; raise --transfer-timeout-s to {needed_s:.3g} here or lower --chunked-prefill-size there",
        )

    def _unhashed(self, peer: Description) -> tuple[str, ...]:
        """A hash is of a whole block, so both ends must hold the same share of its heads."""
        if not self.kv_checksum:
            return ()
        if not peer.kv_checksum:
            return ("kv_checksum: True here, False there; start both nodes with --kv-checksum, or none",)
        mine, theirs = self.fingerprint.tensor_parallel_size, peer.fingerprint.tensor_parallel_size
        if mine != theirs:
            return (
                f"kv_checksum: True, tensor_parallel_size: {mine} here, {theirs} there; hashes are of whole blocks",
            )
        return ()

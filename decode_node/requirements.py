"""What a prefill node has to be before prompts are sent there; told apart field by field."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.kv.layout import Fingerprint
from pdserve.rpc.handoff import MIN_CHUNKS, Description

# A peer that tells nothing new for this long stands still, however long it says its chunks take.
MAX_NO_PROGRESS_S = 600.0


@dataclass(frozen=True, slots=True)
class Requirements:
    """Of one decode node. transfer_timeout_s: how long a peer may tell nothing new, if its chunks don't take longer."""

    fingerprint: Fingerprint
    transfer_timeout_s: float
    kv_checksum: bool = False

    def differences(self, peer: Description) -> tuple[str, ...]:
        """One text a field that keeps the two apart, naming the field and both values (ours first)."""
        return (*self.fingerprint.differences(peer.fingerprint), *self._unhashed(peer))

    def no_progress_s(self, longest_chunk_s: float) -> float:
        """How long a peer whose chunks take that long may tell nothing new."""
        return max(self.transfer_timeout_s, min(MIN_CHUNKS * longest_chunk_s, MAX_NO_PROGRESS_S))

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

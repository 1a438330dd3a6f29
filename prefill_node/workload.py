"""What a prefill node has on its hands, for its decode nodes to choose by."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.request import LeaseId
from pdserve.rpc.handoff import PeerLoad


class Workload:
    """The prompts of one rank's live streams, as the front knows them: the rank is asked nothing.

    Belongs to the event loop.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """num_blocks: of the rank's pool. block_size: tokens."""
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._num_needed_blocks = 0
        self._prompts: dict[LeaseId, tuple[int, int]] = {}  # tokens, and how many of them are computed
        self._queue: dict[LeaseId, None] = {}  # not yet accepted, in order of arrival
        self.num_queued_tokens = 0

    def add(self, lease_id: LeaseId, num_tokens: int) -> None:
        self._prompts[lease_id] = num_tokens, 0
        self._queue[lease_id] = None
        self.num_queued_tokens += num_tokens
        self._num_needed_blocks += self._blocks_of(num_tokens)

    def num_ahead(self, lease_id: LeaseId) -> int:
        """Prompts that came before this one and are not accepted either."""
        return list(self._queue).index(lease_id)

    def accept(self, lease_id: LeaseId) -> None:
        del self._queue[lease_id]

    def compute(self, lease_id: LeaseId, num_done: int) -> None:
        """num_done: of the prompt's tokens, those found in the prefix cache among them."""
        num_tokens, before = self._prompts[lease_id]
        self._prompts[lease_id] = num_tokens, num_done
        self.num_queued_tokens -= num_done - before

    def remove(self, lease_id: LeaseId) -> None:
        num_tokens, num_done = self._prompts.pop(lease_id)
        self._queue.pop(lease_id, None)
        self.num_queued_tokens -= num_tokens - num_done
        self._num_needed_blocks -= self._blocks_of(num_tokens)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that prompts share count for each of them: more may be free than this says."""
        return max(0, self._num_blocks - self._num_needed_blocks)

    def _blocks_of(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def load_of(ranks: Sequence[Workload]) -> PeerLoad:
    """Of all ranks of a node: what a prompt that comes now has before it, and the room it finds."""
    num_queued_tokens = sum(rank.num_queued_tokens for rank in ranks)
    return PeerLoad(num_queued_tokens // len(ranks), max(rank.num_free_blocks for rank in ranks))

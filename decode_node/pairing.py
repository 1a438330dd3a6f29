"""Which ranks of a peer our ranks read from, and what of their blocks.

A peer's ranks are numbered data-parallel rank by data-parallel rank. One of those prefills a prompt, and holds each of
its blocks in as many parts as it has processes; each process of ours reads the parts that make up its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.errors import PeerMismatch
from pdserve.kv.head_ranges import BlockMap, head_reads
from pdserve.kv.layout import Fingerprint
from pdserve.rpc.handoff import Description
from pdserve.transfer.base import PeerId


@dataclass(frozen=True, slots=True)
class Pairing:
    """With one life of a peer. peer_tp: processes of each of its data-parallel ranks. num_ranks: processes it has.

    maps: for each process of a rank of ours, what it reads of the blocks of which process of a rank of the peer.
    """

    incarnation: str
    peer_tp: int
    num_ranks: int
    maps: tuple[dict[int, BlockMap], ...]

    @property
    def num_data_parallel_ranks(self) -> int:
        """Of the peer."""
        return self.num_ranks // self.peer_tp

    def peer_id(self, rank: int) -> PeerId:
        return PeerId(f"{self.incarnation}/{rank}")

    def links_of(self, part: int) -> Iterator[tuple[int, BlockMap]]:
        """The peer's ranks that process `part` of each of our ranks reads from, for prompts of any of them."""
        for first in range(0, self.num_ranks, self.peer_tp):
            for place, block_map in self.maps[part].items():
                yield first + place, block_map

    def sources_of(self, part: int, rank: int) -> tuple[tuple[int, PeerId], ...]:
        """Those of them that hold parts of the same blocks as `rank` does; none where `rank` is not read from."""
        first = rank - rank % self.peer_tp
        if rank - first not in self.maps[part]:
            return ()
        return tuple((first + place, self.peer_id(first + place)) for place in self.maps[part])

    def is_read(self, rank: int) -> bool:
        """Some rank of a peer with more of them than the model has heads may be read by nobody."""
        return any(rank % self.peer_tp in maps for maps in self.maps)


def pair(mine: Fingerprint, peer: Description) -> Pairing:
    """Raises PeerMismatch for a peer whose ranks are not what its fingerprint says."""
    mine_tp, peer_tp = mine.tensor_parallel_size, peer.fingerprint.tensor_parallel_size
    num_ranks = len(peer.rank_metadata)
    if num_ranks % peer_tp:
        raise PeerMismatch(f"rank_metadata: of {num_ranks} ranks, tensor_parallel_size is {peer_tp} there")
    maps = tuple(head_reads(mine.layout, peer_tp, mine_tp, part) for part in range(mine_tp))
    return Pairing(peer.incarnation, peer_tp, num_ranks, maps)

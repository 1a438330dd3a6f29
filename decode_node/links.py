"""The links between each process of our ranks and the ranks of peers that it reads from."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from decode_node.pairing import Pairing
from pdserve.engine.messages import ConnectPeer, DropPeer, FromTransport, PeerConnected, PeerUnusable
from pdserve.engine.ranks import Ranks
from pdserve.errors import PeerError
from pdserve.rpc.handoff import Description
from pdserve.transfer.base import PeerId

# Of the process among all of ours, and the peer's rank.
Ends = tuple[int, PeerId]


@dataclass(frozen=True, slots=True)
class _Link:
    """connected: done when the transport has said whether it stands."""

    incarnation: str
    connected: asyncio.Future[None]


class Links:
    """Belongs to the front's event loop. on_lost: called with the incarnation of a peer when a link to it has ended."""

    def __init__(self, ranks: Ranks, on_lost: Callable[[str], None]) -> None:
        self._ranks = ranks
        self._on_lost = on_lost
        self._links: dict[Ends, _Link] = {}
        # Every link ends with one word of the transport's, which no longer counts where we ended it ourselves.
        self._dropped: Counter[Ends] = Counter()

    async def connect(self, description: Description, pairing: Pairing) -> None:
        """Each transport learns the memory it reads and warms the pair. Raises PeerError when one of them cannot.

        All of them answer in any case, they have a deadline.
        """
        links = []
        for place, member in enumerate(self._ranks.members):
            for rank, block_map in pairing.links_of(place % len(pairing.maps)):
                peer = pairing.peer_id(rank)
                link = _Link(description.incarnation, asyncio.get_running_loop().create_future())
                links.append(link)
                self._links[place, peer] = link
                member.tell_transport(ConnectPeer(peer, description.rank_metadata[rank], block_map))
        answers = await asyncio.gather(*(link.connected for link in links), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer

    def drop(self, incarnation: str) -> None:
        """That life of the peer is over: nothing more is read from it."""
        for ends in [ends for ends, link in self._links.items() if link.incarnation == incarnation]:
            place, peer = ends
            link = self._links.pop(ends)
            _settle(link, PeerError("it was given up"))
            self._dropped[ends] += 1
            self._ranks.members[place].tell_transport(DropPeer(peer))

    def on_transport(self, place: int, message: FromTransport) -> None:
        """What the transport of the process at `place` says of a peer."""
        if isinstance(message, PeerConnected | PeerUnusable):
            ends = place, message.peer
            if self._dropped[ends]:
                self._dropped -= Counter({ends: isinstance(message, PeerUnusable)})
            elif (link := self._links.get(ends)) is not None:
                self._on_word(ends, link, message)

    def _on_word(self, ends: Ends, link: _Link, message: PeerConnected | PeerUnusable) -> None:
        if isinstance(message, PeerConnected):
            _settle(link, None)
            return
        del self._links[ends]
        _settle(link, PeerError(message.reason))
        self._on_lost(link.incarnation)


def _settle(link: _Link, error: Exception | None) -> None:
    if link.connected.done():
        return
    if error is None:
        link.connected.set_result(None)
    else:
        link.connected.set_exception(error)

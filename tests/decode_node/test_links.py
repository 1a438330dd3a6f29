"""Links to the ranks of peers: all of them or none, and words of an earlier life are not taken for this one's."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any, cast

import pytest

from decode_node.links import Links
from decode_node.pairing import pair
from pdserve.engine.messages import ConnectPeer, DropPeer, PeerConnected, PeerUnusable, ToTransport
from pdserve.engine.ranks import Ranks
from pdserve.errors import PeerError
from pdserve.kv.layout import Fingerprint
from pdserve.rpc.handoff import Description
from pdserve.transfer.base import PeerId

MINE = Fingerprint(1, "LlamaForCausalLM", "r0", "float32", 16, 2, 4, 16, 288)
PEER = Description("life", "0", replace(MINE, tensor_parallel_size=2), 0, 8, 1024, (b"0", b"1"), 512, 4, 30.0)
ZERO, ONE = PeerId("life/0"), PeerId("life/1")


class Process:
    """What it was told."""

    def __init__(self) -> None:
        self.told: list[ToTransport] = []

    def tell_transport(self, message: ToTransport) -> None:
        self.told.append(message)


class Two:
    """Two data-parallel ranks of one process each, whose transports are played by hand."""

    def __init__(self) -> None:
        self.members = [Process(), Process()]
        self.lost: list[str] = []
        self.links = Links(cast("Ranks", cast("Any", self)), self.lost.append)

    async def connecting(self) -> asyncio.Task[None]:
        task = asyncio.create_task(self.links.connect(PEER, pair(MINE, PEER)))
        await asyncio.sleep(0)
        return task

    def say_all(self, *places: int) -> None:
        for place in places:
            for peer in (ZERO, ONE):
                self.links.on_transport(place, PeerConnected(peer))


async def test_a_peer_is_connected_when_every_process_is_to_every_rank_it_reads_from() -> None:
    two = Two()
    task = await two.connecting()
    told = [[(message.peer, message.metadata) for message in member.told] for member in two.members]  # type: ignore[union-attr]
    assert told == [[(ZERO, b"0"), (ONE, b"1")]] * 2
    two.say_all(0)
    two.links.on_transport(1, PeerConnected(ZERO))
    await asyncio.sleep(0)
    assert not task.done()
    two.links.on_transport(1, PeerConnected(ONE))
    await task
    assert two.lost == []


async def test_one_link_that_fails_is_the_peers_failure_and_told_once_all_have_answered() -> None:
    two = Two()
    task = await two.connecting()
    two.say_all(0)
    two.links.on_transport(1, PeerUnusable(ONE, "no route"))
    assert two.lost == ["life"]
    two.links.on_transport(1, PeerConnected(ZERO))
    with pytest.raises(PeerError, match="no route"):
        await task


async def test_dropping_a_peer_ends_every_link_that_is_left_and_is_no_loss() -> None:
    two = Two()
    task = await two.connecting()
    two.say_all(0, 1)
    await task
    two.links.on_transport(0, PeerUnusable(ZERO, "it died"))
    two.links.drop("life")
    drops = [[message.peer for message in member.told if isinstance(message, DropPeer)] for member in two.members]
    assert drops == [[ONE], [ZERO, ONE]]
    for place, peers in enumerate(drops):
        for peer in peers:
            two.links.on_transport(place, PeerUnusable(peer, "cut off"))
    assert two.lost == ["life"]


async def test_words_of_the_life_before_say_nothing_of_the_next_one() -> None:
    """The transport answers in order, and is behind: it still speaks of links that were dropped meanwhile."""
    two = Two()
    first = await two.connecting()
    two.links.drop("life")
    with pytest.raises(PeerError, match="given up"):
        await first
    second = await two.connecting()
    two.say_all(0, 1)
    for place in (0, 1):
        for peer in (ZERO, ONE):
            two.links.on_transport(place, PeerUnusable(peer, "cut off"))
    await asyncio.sleep(0)
    assert not second.done()
    assert two.lost == []
    two.say_all(0, 1)
    await second
    connects = [sum(isinstance(message, ConnectPeer) for message in member.told) for member in two.members]
    assert connects == [4, 4]

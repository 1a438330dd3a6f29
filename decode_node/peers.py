"""The prefill nodes a decode node may use: found, compared, connected, watched, and set aside while they fail."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import grpc

from pdserve.engine.front import Rank
from pdserve.engine.messages import ConnectPeer, DropPeer, FromTransport, PeerConnected, PeerUnusable
from pdserve.errors import PeerError, PeerMismatch, ProtocolError
from pdserve.kv.layout import Fingerprint
from pdserve.rpc.channel import channel_options
from pdserve.rpc.handoff import Description
from pdserve.rpc.handoff_codec import decode_description
from pdserve.transfer.base import PeerId
from pdserve.v1 import handoff_pb2 as pb
from pdserve.v1 import handoff_pb2_grpc

log = logging.getLogger(__name__)

DESCRIBE_TIMEOUT_S = 5.0
# How often a ready peer is asked whether it is still the same one.
CHECK_S = 5.0
NEVER_CONNECTED = "not connected yet"
FIRST_BACKOFF_S = 0.25
MAX_BACKOFF_S = 5.0


class PeerState(enum.Enum):
    UNREACHABLE = "no_peer"
    MISMATCHED = "peer_mismatch"
    READY = "ready"


@dataclass(slots=True, eq=False)
class Peer:
    """One prefill node by address. description: of its present life, while READY. reason: why it is not."""

    target: str
    channel: grpc.aio.Channel
    stub: handoff_pb2_grpc.HandoffAsyncStub
    state: PeerState = PeerState.UNREACHABLE
    reason: str = NEVER_CONNECTED
    description: Description | None = None
    outstanding_tokens: int = 0
    suspect: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def id(self) -> PeerId:
        """Of its rank 0, in this life."""
        assert self.description is not None
        return PeerId(f"{self.description.incarnation}/0")

    @property
    def is_ready(self) -> bool:
        return self.state is PeerState.READY and self.description is not None

    @property
    def max_prompt_tokens(self) -> int:
        return 0 if self.description is None else self.description.max_prompt_tokens

    def why_not(self, num_tokens: int) -> str:
        """Why it was not chosen for a prompt this long."""
        if self.is_ready:
            return f"prompt has {num_tokens} tokens, its limit is {self.max_prompt_tokens}"
        return self.reason

    def doubt(self) -> None:
        """A call to it failed: look at it again before it is chosen again."""
        self.state, self.reason = PeerState.UNREACHABLE, "a call to it failed"
        self.suspect.set()


class PeerTable:
    """Belongs to the front's event loop; `watch` runs for as long as the node does."""

    def __init__(self, targets: Iterable[str], mine: Fingerprint, rank: Rank, max_message_bytes: int) -> None:
        self._mine = mine
        self._rank = rank
        self._connecting: dict[PeerId, asyncio.Future[None]] = {}
        self._by_id: dict[PeerId, Peer] = {}
        self.peers = [_peer(target, max_message_bytes) for target in targets]

    # ------------------------------------------------------------ choice

    def choose(self, num_tokens: int) -> Peer | None:
        """The ready peer with the least outstanding prefill tokens that takes a prompt this long; None if none does."""
        ready = [peer for peer in self.peers if peer.is_ready and num_tokens <= peer.max_prompt_tokens]
        if not ready:
            return None
        peer = min(ready, key=lambda peer: peer.outstanding_tokens)
        peer.outstanding_tokens += num_tokens
        return peer

    @property
    def num_ready(self) -> int:
        """Peers that may be chosen now."""
        return sum(peer.is_ready for peer in self.peers)

    @property
    def num_outstanding_tokens(self) -> int:
        """Prompt tokens that peers were given and have not drawn a first token from."""
        return sum(peer.outstanding_tokens for peer in self.peers)

    def why_none(self, num_tokens: int) -> PeerError:
        """Why no peer can be had for a prompt this long."""
        if not self.peers:
            return PeerError("no prefill node is configured: set --prefill-peers")
        said = "; ".join(f"{peer.target}: {peer.why_not(num_tokens)}" for peer in self.peers)
        if any(peer.state is PeerState.MISMATCHED for peer in self.peers):
            return PeerMismatch(f"no prefill node can be used: {said}")
        return PeerError(f"no prefill node can be reached: {said}")

    # ------------------------------------------------------------ watching

    async def watch(self) -> None:
        """Keep every peer's state true, until cancelled."""
        try:
            async with asyncio.TaskGroup() as group:
                for peer in self.peers:
                    group.create_task(self._watch_peer(peer))
        finally:
            for peer in self.peers:
                await peer.channel.close()

    async def _watch_peer(self, peer: Peer) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            peer.suspect.clear()
            try:
                await self._make_ready(peer)
            except PeerError as error:
                self._set_aside(peer, error)
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            else:
                backoff_s = FIRST_BACKOFF_S
                with suppress(TimeoutError):
                    async with asyncio.timeout(CHECK_S):
                        await peer.suspect.wait()

    async def _make_ready(self, peer: Peer) -> None:
        description = await self._describe(peer, peer.description.incarnation if peer.description else "")
        # Looked at only now: the peer may have been lost while it was asked.
        if peer.description is not None and peer.description.incarnation != description.incarnation:
            self._rank.tell_transport(DropPeer(peer.id))
            peer.description = None
        if differences := self._mine.differences(description.fingerprint):
            raise PeerMismatch("; ".join(differences))
        if peer.description is None:
            await self._connect(peer, description)
            log.info("prefill node %s is ready (incarnation %s)", peer.target, description.incarnation)
        peer.state = PeerState.READY

    async def _describe(self, peer: Peer, known_incarnation: str) -> Description:
        request = pb.DescribeRequest(known_incarnation=known_incarnation)
        try:
            return decode_description(await peer.stub.Describe(request, timeout=DESCRIBE_TIMEOUT_S))
        except grpc.aio.AioRpcError as error:
            raise PeerError(f"{error.code().name}: {error.details()}") from None
        except ProtocolError as error:
            raise PeerError(error.message) from None

    async def _connect(self, peer: Peer, description: Description) -> None:
        """The transport learns the peer's memory and warms the pair; it answers in any case, it has a deadline."""
        peer.description = description
        self._by_id[peer.id] = peer
        future = self._connecting[peer.id] = asyncio.get_running_loop().create_future()
        self._rank.tell_transport(ConnectPeer(peer.id, description.rank_metadata[0]))
        try:
            await future
        except PeerError as error:
            peer.description = None
            raise PeerError(f"its memory cannot be read: {error.message}") from None

    def _set_aside(self, peer: Peer, error: PeerError) -> None:
        state = PeerState.MISMATCHED if isinstance(error, PeerMismatch) else PeerState.UNREACHABLE
        if (peer.state, peer.reason) != (state, error.message):
            # Nodes start in any order: one that was never there is waited for, one that is lost is news.
            level = logging.INFO if peer.reason == NEVER_CONNECTED else logging.WARNING
            log.log(level, "prefill node %s is not usable: %s", peer.target, error.message)
        peer.state, peer.reason = state, error.message

    # ------------------------------------------------------------ transport

    def on_transport(self, message: FromTransport) -> None:
        if isinstance(message, PeerConnected):
            _settle(self._connecting.pop(message.peer, None), None)
        elif isinstance(message, PeerUnusable):
            _settle(self._connecting.pop(message.peer, None), PeerError(message.reason))
            peer = self._by_id.pop(message.peer, None)
            if peer is not None and peer.description is not None and peer.id == message.peer:
                peer.description = None
                peer.doubt()


def _peer(target: str, max_message_bytes: int) -> Peer:
    # A handoff that was not confirmed is a new attempt of ours, never a retry of gRPC's.
    # By itself a channel would leave a peer that was gone for long alone for up to two minutes more.
    options = [
        *channel_options(max_message_bytes),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", round(FIRST_BACKOFF_S * 1000)),
        # Ours comes on top: together a peer that is back is noticed within MAX_BACKOFF_S + 1.
        ("grpc.max_reconnect_backoff_ms", 1000),
    ]
    channel = grpc.aio.insecure_channel(target, options=options)
    # The generated class serves both kinds of channel; its types know the blocking one.
    stub = cast("handoff_pb2_grpc.HandoffAsyncStub", handoff_pb2_grpc.HandoffStub(cast(Any, channel)))
    return Peer(target, channel, stub)


def _settle(future: asyncio.Future[None] | None, error: Exception | None) -> None:
    if future is None or future.done():
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)

"""One prefill node as a decode node sees it: by its address, through one life of it after another."""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, field
from typing import Any, cast

import grpc

from decode_node.pairing import Pairing
from decode_node.words import plain
from pdserve.engine.prefix_memory import PrefixMemory
from pdserve.errors import PeerError, PeerMismatch, ProtocolError
from pdserve.rpc.channel import channel_options
from pdserve.rpc.handoff import Description, PeerLoad
from pdserve.rpc.handoff_codec import decode_description, decode_load, encode_describe
from pdserve.v1 import handoff_pb2_grpc

DESCRIBE_TIMEOUT_S = 5.0
# gRPC's own attempts to reach a node that is gone: a returned one is found within about a second.
FIRST_RECONNECT_MS = 250
MAX_RECONNECT_MS = 1000
NEVER_CONNECTED = "not connected yet"
# Failures in a row, of any kind, after which a peer rests although it says that it is well.
MAX_FAILURES_IN_A_ROW = 2

Channel = grpc.aio.Channel


class PeerState(enum.Enum):
    UNREACHABLE = "no_peer"
    MISMATCHED = "peer_mismatch"
    READY = "ready"


@dataclass(slots=True, eq=False)
class Peer:
    """description, pairing: of its present life, while it can be read from. reason: why it is not READY.

    num_outstanding_tokens: that we gave it and have not drawn a first token from. num_handoffs: live ones; `is_idle`
    is set while there are none. is_leaving: it is in no list of peers any more. longest_chunk_s: lately, as it said
    last. was_ready: in any life of it. is_loss_told, is_patience_told: the log has that it cannot be used, that it is
    waited for longer. num_failures: in a row. news: set when its watcher has something to look at. looked_at: set while
    nothing was said against it since it was looked at.
    """

    target: str
    channel: Channel
    stub: handoff_pb2_grpc.HandoffAsyncStub
    state: PeerState = PeerState.UNREACHABLE
    reason: str = NEVER_CONNECTED
    description: Description | None = None
    pairing: Pairing | None = None
    load: PeerLoad | None = None
    prefixes: PrefixMemory = field(default_factory=lambda: PrefixMemory(0))
    num_outstanding_tokens: int = 0
    num_handoffs: int = 0
    is_leaving: bool = False
    longest_chunk_s: float = 0.0
    was_ready: bool = False
    is_loss_told: bool = False
    is_patience_told: bool = False
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)
    num_failures: int = 0
    must_rest: bool = False
    news: asyncio.Event = field(default_factory=asyncio.Event)
    looked_at: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.is_idle.set()

    @property
    def is_ready(self) -> bool:
        return self.state is PeerState.READY and self.description is not None and not self.is_leaving

    @property
    def is_reachable(self) -> bool:
        """A connection to it stands, whatever it says over it."""
        return self.channel.get_state() is grpc.ChannelConnectivity.READY

    @property
    def max_prompt_tokens(self) -> int:
        return 0 if self.description is None else self.description.max_prompt_tokens

    @property
    def num_queued_tokens(self) -> int:
        """Before a prompt that comes there now, on one of its data-parallel ranks.

        What it says includes what we gave it, but of a moment ago: the larger of the two.
        """
        said = 0 if self.load is None else self.load.num_queued_tokens
        num_ranks = 1 if self.pairing is None else self.pairing.num_data_parallel_ranks
        return max(said, self.num_outstanding_tokens // num_ranks)

    def has_room(self, num_tokens: int) -> bool:
        """Its free blocks hold a prompt this long; assumed where it has not said how many are free."""
        if self.load is None or self.description is None:
            return True
        return num_tokens <= self.load.num_free_blocks * self.description.fingerprint.block_size

    def why_not(self, num_tokens: int) -> str:
        """Why it was not chosen for a prompt this long."""
        if self.is_ready:
            return f"prompt has {num_tokens} tokens, its limit is {self.max_prompt_tokens}"
        return self.reason

    def doubt(self) -> None:
        """A call to it failed: look at it again before it is chosen again; after several in a row, not at once.

        Calls that fail together, as when it dies, are one failure.
        """
        if self.state is PeerState.READY:
            self.num_failures += 1
        self.must_rest = self.num_failures >= MAX_FAILURES_IN_A_ROW
        self.ask_again("a call to it failed")

    def ask_again(self, reason: str) -> None:
        """It is not what it was described to be: describe it before it is chosen again."""
        self.state, self.reason = PeerState.UNREACHABLE, reason
        self.looked_at.clear()
        self.news.set()

    def succeeded(self) -> None:
        """It did what it is for."""
        self.num_failures, self.must_rest = 0, False

    def begin_life(self, description: Description, pairing: Pairing) -> None:
        """What was known of the life before says nothing of this one."""
        self.description, self.pairing = description, pairing
        self.is_patience_told = False
        self.succeeded()
        self.prefixes = PrefixMemory(description.num_blocks)

    def begin_handoff(self) -> None:
        self.num_handoffs += 1
        self.is_idle.clear()

    def end_handoff(self) -> None:
        self.num_handoffs -= 1
        if self.num_handoffs == 0:
            self.is_idle.set()

    async def describe(self) -> Description:
        """Raises PeerError when it does not answer, or with what no peer of ours would say."""
        known = self.description.incarnation if self.description is not None else ""
        try:
            answer = await self.stub.Describe(encode_describe(known), timeout=DESCRIBE_TIMEOUT_S)
            self.load = decode_load(answer) or self.load
            return decode_description(answer)
        except grpc.aio.AioRpcError as error:
            is_mismatch = error.code() is grpc.StatusCode.FAILED_PRECONDITION
            raise (PeerMismatch if is_mismatch else PeerError)(plain(error)) from None
        except ProtocolError as error:
            raise PeerError(error.message) from None

    async def until_reachable(self, limit_s: float) -> None:
        """Returns when a connection stands, or after limit_s seconds."""
        try:
            async with asyncio.timeout(limit_s):
                while (state := self.channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
                    await self.channel.wait_for_state_change(state)
        except TimeoutError:
            return


def make_peer(target: str, max_message_bytes: int) -> Peer:
    # A handoff that was not confirmed is a new attempt of ours, never a retry of gRPC's.
    # By itself a channel would leave a peer that was gone for long alone for up to two minutes more.
    options = [
        *channel_options(max_message_bytes),
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", FIRST_RECONNECT_MS),
        ("grpc.min_reconnect_backoff_ms", FIRST_RECONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_MS),
    ]
    channel = grpc.aio.insecure_channel(target, options=options)
    # The generated class serves both kinds of channel; its types know the blocking one.
    stub = cast("handoff_pb2_grpc.HandoffAsyncStub", handoff_pb2_grpc.HandoffStub(cast(Any, channel)))
    return Peer(target, channel, stub)

"""Nodes of every kind in one process: real fronts, sockets and services around ranks whose model is a fake."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import decode_node.node
import fused.node
import prefill_node.node
from pdserve.client.aio import AsyncClient
from pdserve.client.types import Answer
from pdserve.config import Role, ServerArgs
from pdserve.engine.channel import FrontChannel, private_directory
from pdserve.engine.front import Rank
from pdserve.engine.member import Member
from pdserve.engine.messages import FromRank, FromTransport, PeerConnected, ToRank, ToTransport
from pdserve.engine.ranks import Ranks
from pdserve.model.fake import expected_tokens
from pdserve.node import Build, Site
from pdserve.request import RankLoad
from pdserve.rpc.fake import ByteTokenizer
from pdserve.rpc.server import RpcServer
from pdserve.transfer.base import PeerId
from pdserve.transfer.loopback import LoopbackNetwork
from tests.roles.heads import Exchange
from tests.roles.inside import BANNED, VOCAB_SIZE, HeldRunner, Size
from tests.roles.journal import LIMIT_S, Journal
from tests.roles.threads import FollowerThread, Inside, PartThread, RankThread

BUILDS: dict[Role, Build] = {
    Role.FUSED: fused.node.build,
    Role.PREFILL: prefill_node.node.build,
    Role.DECODE: decode_node.node.build,
}


@dataclass(frozen=True, slots=True)
class Told:
    """A front heard it from a transport thread. part: the process among all of the node's."""

    node: str
    message: FromTransport
    kind: type[FromTransport]
    part: int = 0


@dataclass
class Node:
    """One life of one node; `name` is of this life alone. insides: one a rank."""

    name: str
    args: ServerArgs
    ranks: Ranks
    insides: Sequence[Inside]
    network: LoopbackNetwork
    client: AsyncClient
    server: RpcServer
    background: list[asyncio.Task[None]]
    is_stopped: bool = False

    @property
    def address(self) -> str:
        return self.args.address

    @property
    def rank(self) -> Rank:
        """Its first, and mostly its only one."""
        return self.ranks[0]

    @property
    def inside(self) -> RankThread:
        """Of the first process of the first rank."""
        return self.insides[0].leader

    @property
    def followers(self) -> Sequence[FollowerThread]:
        """Of the other processes of the first rank."""
        return self.insides[0].followers

    @property
    def runner(self) -> HeldRunner:
        return self.inside.runner

    async def loads(self) -> Sequence[RankLoad]:
        """Of each rank. Raises InternalError where the tables of one of them disagree."""
        return await self.client.loads(check_integrity=True, timeout_s=LIMIT_S)

    async def load(self) -> RankLoad:
        """Of the first rank. Raises InternalError where the tables of one of them disagree."""
        return (await self.loads())[0]

    async def counters(self) -> dict[str, int]:
        return dict((await self.load()).counters)

    async def stop(self) -> None:
        if self.is_stopped:
            return
        self.is_stopped = True
        for inside in self.insides:
            inside.stop()
        await self.server.stop(grace_s=0)
        for task in self.background:
            task.cancel()
        await asyncio.gather(*self.background, return_exceptions=True)
        await self.ranks.stop()
        for inside in self.insides:
            await asyncio.to_thread(inside.join)
        await self.client.close()

    def lose_rank(self) -> None:
        """What the node does when its rank process has ended."""
        self.rank._on_lost("the process of the rank ended with status -9")

    async def die(self) -> None:
        """As a killed process: nothing of it can be read from one moment to the next, its streams break."""
        for inside in self.insides:
            for part in inside.parts:
                self.network.kill(part.name)
        await self.stop()


@dataclass
class Cluster:
    """Starts nodes, ends them all."""

    journal: Journal
    network: LoopbackNetwork
    stack: AsyncExitStack
    names: itertools.count[int] = field(default_factory=itertools.count)

    async def start(self, role: Role, size: Size | None = None, **settings: object) -> Node:
        size = size or Size()
        name = f"{role}{next(self.names)}"
        args = ServerArgs(
            model="fake",
            role=role,
            port=settings.pop("port", 0),
            max_num_seqs=size.num_slots * size.num_ranks,
            tensor_parallel_size=size.num_parts,
            data_parallel_size=size.num_ranks,
            kv_lease_s=size.lease_s,
            kv_checksum=size.has_checksums,
        )
        for key, value in settings.items():
            setattr(args, key, value)
        sockets = self.stack.enter_context(private_directory())
        insides = [self._inside(name, role, size, number, sockets) for number in range(size.num_ranks)]
        ranks = Ranks([_rank(args, inside) for inside in insides])
        for part in (part for inside in insides for part in inside.parts):
            part.start()
        readies = await asyncio.gather(*(member.attach(timeout_s=LIMIT_S) for member in ranks.members))
        parts = BUILDS[role](Site(args, ranks, readies, ByteTokenizer(), incarnation=f"life-of-{name}"))
        self._watch(name, ranks)
        server = RpcServer(parts.services, port=args.port)
        args.port = await server.start()
        await server.set_serving(True)
        background = [asyncio.create_task(work) for work in parts.background]
        client = AsyncClient(args.address, max_attempts=1)
        node = Node(name, args, ranks, insides, self.network, client, server, background)
        self.stack.push_async_callback(node.stop)
        return node

    def _inside(self, name: str, role: Role, size: Size, number: int, sockets: Path) -> Inside:
        exchange = Exchange(size.num_parts)

        def place(part: int) -> tuple[str, Size, LoopbackNetwork, Journal, str, str, bool, Exchange, int]:
            index = number * size.num_parts + part
            part_name = f"{name}-{index}" if index else name
            ends = f"ipc://{sockets}/loop{index}", f"ipc://{sockets}/transport{index}"
            return (part_name, size, self.network, self.journal, *ends, role is not Role.FUSED, exchange, part)

        others = range(1, size.num_parts)
        step_endpoints = [f"ipc://{sockets}/step{number}-{part}" for part in others]
        leader = RankThread(*place(0), step_endpoints=step_endpoints, number=number)
        return Inside(leader, [FollowerThread(*place(part), leader=leader) for part in others])

    def _watch(self, name: str, ranks: Ranks) -> None:
        for part, member in enumerate(ranks.members):
            member.on_transport = self._noting(name, part, member.on_transport)

    def _noting(
        self, name: str, part: int, listener: Callable[[FromTransport], None]
    ) -> Callable[[FromTransport], None]:
        def on_transport(message: FromTransport) -> None:
            listener(message)
            self.journal.note(Told(name, message, type(message), part))

        return on_transport

    async def pair(self, size: Size | None = None, decode_size: Size | None = None, **settings: object) -> Pair:
        """A prefill node, and a decode node that has it as its peer."""
        prefill = await self.start_prefill(size)
        decode = await self.decode_of(prefill.address, size=decode_size or size, **settings)
        return Pair(prefill, decode, self.journal, self.network)

    async def start_prefill(self, size: Size | None = None, **settings: object) -> Node:
        return await self.start(Role.PREFILL, size, **settings)

    async def decode_of(self, *addresses: str, size: Size | None = None, **settings: object) -> Node:
        """A decode node that is connected to the peers at these addresses."""
        decode = await self.start(Role.DECODE, size, prefill_peers=addresses, **settings)
        await until_ready(decode, len(addresses))
        return decode

    async def until_told_connected(self, decode: Node, prefill: Node) -> None:
        """Until `decode` can read from this life of `prefill`."""
        await self.journal.first(Told, node=decode.name, message=PeerConnected(PeerId(f"life-of-{prefill.name}/0")))

    async def until_connected(self, decode: Node, prefill: Node) -> None:
        """Until `decode` would choose this life of `prefill`; its loop must not be held."""
        await self.until_told_connected(decode, prefill)
        await until_ready(decode)


def _rank(args: ServerArgs, inside: Inside) -> Rank:
    max_live = args.max_num_seqs_a_rank + args.max_queued_requests // args.data_parallel_size
    return Rank([_member(part) for part in inside.parts], max_live=max_live, number=inside.leader.number)


def _member(part: PartThread) -> Member:
    channel: FrontChannel[FromRank, ToRank] = FrontChannel(part.loop_endpoint, FromRank)
    transport: FrontChannel[FromTransport, ToTransport] | None = None
    if part.has_transport:
        transport = FrontChannel(part.transport_endpoint, FromTransport)
    return Member(channel, transport, part.name)


@dataclass(frozen=True)
class Pair:
    prefill: Node
    decode: Node
    journal: Journal
    network: LoopbackNetwork

    async def settle(self) -> None:
        await settle(self.prefill, self.decode)


@asynccontextmanager
async def cluster() -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        # Its ipc directories go last; everything else ends before the block does.
        yield Cluster(Journal(), LoopbackNetwork(), stack)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    random = Random(f"{seed} {length}")
    return [random.randrange(256) for _ in range(length)]


def answer_to(prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """What any node must answer."""
    return tuple(expected_tokens(prompt, num_tokens, VOCAB_SIZE, BANNED))


async def ask(node: Node, prompt: Sequence[int], num_tokens: int = 6, **options: object) -> Answer:
    """One answer; it is what it must be as far as it goes."""
    answer = await node.client.generate(token_ids=prompt, max_new_tokens=num_tokens, timeout_s=LIMIT_S, **options)
    assert answer.token_ids == answer_to(prompt, len(answer.token_ids))
    return answer


async def until(is_reached: Callable[[], bool]) -> None:
    """Lets everything else on the event loop go on until it is so."""
    async with asyncio.timeout(LIMIT_S):
        while not is_reached():  # noqa: ASYNC110 - nothing would set an event for it
            await asyncio.sleep(0)


async def until_load(node: Node, is_reached: Callable[[RankLoad], bool]) -> RankLoad:
    """The node's load once it is as wanted; it is asked over and over."""
    async with asyncio.timeout(LIMIT_S):
        while not is_reached(load := await node.load()):
            pass
    return load


async def until_ready(decode: Node, num_peers: int = 1) -> None:
    await until_load(decode, lambda load: load.counters["num_ready_peers"] == num_peers)


def leftovers(node: Node, load: RankLoad) -> dict[str, int]:
    """What a rank without requests should not have, and has, in any of its parts."""
    inside = node.insides[load.rank]
    held = {
        "held blocks": load.num_held_blocks,
        "quarantined blocks": load.num_quarantined_blocks,
        "leases": inside.count("live_leases"),
        "transfers": load.num_open_transfers,
        "running": load.num_running,
        "waiting": load.num_waiting,
        "open pulls": inside.count("open_pulls"),
        "open reads": inside.count("open_reads"),
        "half told": inside.num_half_told,
        "outstanding tokens": load.counters.get("outstanding_prefill_tokens", 0),
        "requests of the front": node.ranks[load.rank].num_live,
        "requests of the loop": len(inside.leader.loop._live),
    }
    return {what: count for what, count in held.items() if count}


async def settle(*nodes: Node) -> None:
    """Until no node has anything left of any request; their tables are sound all the while."""
    for node in nodes:
        left: dict[str, int] = {}
        try:
            async with asyncio.timeout(LIMIT_S):
                while left := {what: n for load in await node.loads() for what, n in leftovers(node, load).items()}:
                    pass
        except TimeoutError:
            raise AssertionError(f"{node.name} keeps {left}") from None

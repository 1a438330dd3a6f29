"""What a node's services stand on while one rank lives, and how such a rank is started and ended."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from pdserve.assembly.assembly import Assembly
from pdserve.assembly.guest import Guest
from pdserve.config import LoadBalanceMethod, ServerArgs
from pdserve.engine.channel import FrontChannel, private_directory
from pdserve.engine.dispatch import Dispatch, PrefixAffinity, RoundRobin, least_kv, shortest_queue
from pdserve.engine.front import Rank
from pdserve.engine.launch import RankProcess, RankSpec
from pdserve.engine.member import Launch, Member, OnLoading
from pdserve.engine.messages import FromRank, FromTransport, Loading, Ready, ToRank, ToTransport
from pdserve.engine.ranks import Ranks
from pdserve.engine.text_generator import TextGenerator, TokenSource
from pdserve.model.digests import DigestCache
from pdserve.model.revision import Revision
from pdserve.node.spec import grid_of, node_of, rank_spec
from pdserve.request import RankLoad
from pdserve.rpc.generator import Generator, Tokenizer
from pdserve.rpc.inference import InferenceServicer, inference_service
from pdserve.rpc.limits import ModelCard
from pdserve.rpc.server import Service


@dataclass(frozen=True, slots=True)
class Site:
    """What a node's services are built on. readies: of every process. incarnation: of this life of its ranks."""

    args: ServerArgs
    ranks: Ranks
    readies: Sequence[Ready]
    tokenizer: Tokenizer
    incarnation: str

    @property
    def ready(self) -> Ready:
        """Of the first; what the node says of itself, the others say too."""
        return self.readies[0]

    def text(self, source: TokenSource) -> TextGenerator:
        """Text answers over a source of tokens."""
        return TextGenerator(source, self.tokenizer)

    def inference(self, generator: Generator) -> Service:
        """pdserve.v1.Inference over `generator`."""
        card = ModelCard(
            served_name=self.args.public_name,
            architecture=self.ready.fingerprint.architecture,
            max_model_len=self.ready.max_model_len,
            vocab_size=self.ready.vocab_size,
            eos_token_ids=self.ready.eos_token_ids,
            revision=self.ready.fingerprint.model_revision,
        )
        settings = {"role": str(self.args.role), "incarnation": self.incarnation}
        return inference_service(InferenceServicer(generator, self.tokenizer, card, settings=settings))


async def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Parts:
    """What one kind of node is made of.

    background: runs for as long as the site stands. before_serving: what it waits for then, for seconds at most.
    """

    services: list[Service]
    loads: Callable[[], Awaitable[list[RankLoad]]]
    background: list[Coroutine[Any, Any, None]] = field(default_factory=list)
    before_serving: Callable[[], Awaitable[None]] = _nothing


Build = Callable[[Site], Parts]


@dataclass(frozen=True, slots=True)
class Sites:
    """Makes a site for each life of the ranks, every one with an incarnation, sockets and agents of its own.

    model: what every life of the ranks has to load. assembly: where the other nodes of a group come to, if any.
    """

    args: ServerArgs
    model: Revision
    digests: DigestCache
    tokenizer: Tokenizer
    has_transport: bool
    are_in_step: bool
    assembly: Assembly | None = None

    @asynccontextmanager
    async def open(self, on_loading: OnLoading) -> AsyncIterator[Site]:
        """A site with warm ranks, which end with the block. Raises StartupError."""
        incarnation = uuid.uuid4().hex
        model = await asyncio.to_thread(self.model.renewed, self.digests)
        guests = await self._guests(on_loading)
        with private_directory() as sockets:
            specs = [
                rank_spec(self.args, model, sockets, incarnation, self.has_transport, grid)
                for grid in grid_of(self.args, sockets, is_in_step=self.are_in_step)
            ]
            members = [_member(spec, self._launch_of(spec, guests)) for spec in specs]
            specs = [spec.bound(*member.endpoints) for spec, member in zip(specs, members, strict=True)]
            ranks = _ranks(self.args, members, self.are_in_step)
            try:
                for guest in guests:
                    guest.order([spec for spec in specs if node_of(self.args, spec.grid.rank) == guest.node_rank])
                readies = await ranks.start(specs, timeout_s=self.args.startup_timeout_s, on_loading=on_loading)
                await asyncio.to_thread(model.refuse_changed)
                ranks.dispatch = _dispatch(self.args, readies[0])
                yield Site(self.args, ranks, readies, self.tokenizer, incarnation)
            finally:
                await ranks.stop()
                for guest in guests:
                    guest.dismiss()

    async def _guests(self, on_loading: OnLoading) -> list[Guest]:
        """The other nodes, once all are here. Raises StartupError."""
        if self.assembly is None:
            return []
        num_others = self.args.nnodes - 1
        return await self.assembly.gather(
            self.args.startup_timeout_s, lambda here: on_loading(Loading("waiting for other nodes", here, num_others))
        )

    def _launch_of(self, spec: RankSpec, guests: Sequence[Guest]) -> Launch:
        """How a rank's process is started: by this node, or by the one it is on."""
        node = node_of(self.args, spec.grid.rank)
        return guests[node - 1].process_of if node else RankProcess.start


def _ranks(args: ServerArgs, members: Sequence[Member], are_in_step: bool) -> Ranks:
    tp_size = args.tensor_parallel_size
    max_live = args.max_num_seqs_a_rank + args.max_queued_requests // args.data_parallel_size
    ranks = [
        Rank(members[first : first + tp_size], max_live=max_live, number=number)
        for number, first in enumerate(range(0, len(members), tp_size))
    ]
    return Ranks(ranks, are_in_step=are_in_step)


def _member(spec: RankSpec, launch: Launch) -> Member:
    channel: FrontChannel[FromRank, ToRank] = FrontChannel(spec.endpoint, FromRank)
    transport: FrontChannel[FromTransport, ToTransport] | None = None
    if spec.transport is not None:
        transport = FrontChannel(spec.transport.endpoint, FromTransport)
    name = f"rank {spec.grid.rank}" if spec.grid.num_ranks > 1 else "the rank"
    return Member(channel, transport, name, launch)


def _dispatch(args: ServerArgs, ready: Ready) -> Dispatch:
    match args.load_balance_method:
        case LoadBalanceMethod.ROUND_ROBIN:
            return RoundRobin()
        case LoadBalanceMethod.LEAST_KV:
            return least_kv
        case LoadBalanceMethod.PREFIX_AFFINITY:
            return PrefixAffinity(args.data_parallel_size, ready.num_blocks, ready.fingerprint.block_size)
        case _:
            return shortest_queue

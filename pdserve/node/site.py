"""What a node's services stand on while one rank lives, and how such a rank is started and ended."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.config import ServerArgs
from pdserve.engine.channel import FrontChannel, private_directory
from pdserve.engine.front import OnLoading, Rank
from pdserve.engine.launch import RankSpec
from pdserve.engine.messages import FromRank, FromTransport, Ready, ToRank, ToTransport
from pdserve.engine.text_generator import TextGenerator, TokenSource
from pdserve.node.spec import rank_spec
from pdserve.request import RankLoad
from pdserve.rpc.generator import Generator, Tokenizer
from pdserve.rpc.inference import InferenceServicer, inference_service
from pdserve.rpc.limits import ModelCard
from pdserve.rpc.server import Service


@dataclass(frozen=True, slots=True)
class Site:
    """What a node's services are built on. incarnation: of this life of its rank."""

    args: ServerArgs
    rank: Rank
    ready: Ready
    tokenizer: Tokenizer
    incarnation: str

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


@dataclass(frozen=True, slots=True)
class Parts:
    """What one kind of node is made of. background: runs for as long as the site stands."""

    services: list[Service]
    loads: Callable[[], Awaitable[list[RankLoad]]]
    background: list[Coroutine[Any, Any, None]] = field(default_factory=list)


Build = Callable[[Site], Parts]


@dataclass(frozen=True, slots=True)
class Sites:
    """Makes a site for each life of the rank, every one with an incarnation, sockets and agents of its own."""

    args: ServerArgs
    directory: Path
    tokenizer: Tokenizer
    has_transport: bool

    @asynccontextmanager
    async def open(self, on_loading: OnLoading) -> AsyncIterator[Site]:
        """A site with a warm rank, which ends with the block. Raises StartupError."""
        incarnation = uuid.uuid4().hex
        with private_directory() as sockets:
            spec = rank_spec(self.args, self.directory, sockets, incarnation, self.has_transport)
            rank = _rank(self.args, spec)
            try:
                ready = await rank.start(spec, timeout_s=self.args.startup_timeout_s, on_loading=on_loading)
                yield Site(self.args, rank, ready, self.tokenizer, incarnation)
            finally:
                await rank.stop()


def _rank(args: ServerArgs, spec: RankSpec) -> Rank:
    channel: FrontChannel[FromRank, ToRank] = FrontChannel(spec.endpoint, FromRank)
    transport: FrontChannel[FromTransport, ToTransport] | None = None
    if spec.transport is not None:
        transport = FrontChannel(spec.transport.endpoint, FromTransport)
    return Rank(channel, max_live=args.max_num_seqs + args.max_queued_requests, transport=transport)

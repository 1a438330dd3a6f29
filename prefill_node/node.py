"""What makes a node a prefill node: it answers decode nodes, and nobody else."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

from pdserve import __version__, node
from pdserve.config import ServerArgs
from pdserve.engine.local_tokens import LocalTokens
from pdserve.errors import WrongRole
from pdserve.node import Parts, Site
from pdserve.request import GenerateChunk, GenerateRequest, RankLoad, RequestId
from pdserve.rpc.admin import admin_service
from pdserve.rpc.handoff import Description
from pdserve.rpc.server import Service
from pdserve.v1.handoff_pb2_grpc import add_HandoffServicer_to_server
from prefill_node.service import HandoffServicer

SERVICE_NAME = "pdserve.v1.Handoff"


def run(args: ServerArgs) -> None:
    """Serve until stopped."""
    node.run(args, build, has_transport=True)


def build(site: Site) -> Parts:
    servicer = HandoffServicer(site.ranks, describe(site))
    handoff = Service(SERVICE_NAME, partial(add_HandoffServicer_to_server, servicer))
    tokens = LocalTokens(site.ranks)
    return Parts([handoff, site.inference(NotTheFrontDoor(tokens)), admin_service(site.ranks)], tokens.loads)


def describe(site: Site) -> Description:
    """This life of this node, as decode nodes see it."""
    ready = site.ready
    return Description(
        incarnation=site.incarnation,
        version=__version__,
        fingerprint=ready.fingerprint,
        weights_version=0,
        num_blocks=min(one.num_blocks for one in site.readies),
        block_bytes=ready.block_bytes,
        rank_metadata=tuple(one.transport_metadata for one in site.readies),
        max_prompt_tokens=ready.max_model_len,
        num_slots=site.args.max_num_seqs_a_rank,
        lease_s=site.args.kv_lease_s,
        longest_chunk_s=max(one.longest_chunk_s for one in site.readies),
        kv_checksum=site.args.kv_checksum,
    )


class NotTheFrontDoor:
    """Inference on a prefill node: everything but answers."""

    def __init__(self, tokens: LocalTokens) -> None:
        self._tokens = tokens

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        raise WrongRole("a prefill node does not answer: send the request to a decode node that has it as a peer")
        yield  # makes it the generator that callers expect

    async def abort(self, request_id: RequestId) -> bool:
        return False

    async def loads(self, *, check_integrity: bool = False) -> list[RankLoad]:
        return await self._tokens.loads(check_integrity=check_integrity)

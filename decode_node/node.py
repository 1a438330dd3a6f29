"""What makes a node a decode node: prompts go to its peers, their KV comes here, answers are generated here."""

from __future__ import annotations

from decode_node.answer import HandoffPolicy
from decode_node.generator import RemotePrefillTokens
from decode_node.handoffs import Handoffs
from decode_node.peers import PeerTable
from decode_node.requirements import Requirements
from pdserve import node
from pdserve.config import ServerArgs
from pdserve.node import Parts, Site
from pdserve.rpc.admin import admin_service


def run(args: ServerArgs) -> None:
    """Serve until stopped."""
    node.run(args, build, has_transport=True)


def build(site: Site) -> Parts:
    args, ranks, fingerprint = site.args, site.ranks, site.ready.fingerprint
    required = Requirements(fingerprint, args.transfer_timeout_s, args.kv_checksum)
    peers = PeerTable(args.prefill_peers, required, ranks, args.max_message_mib * 2**20, site.incarnation)
    handoffs = Handoffs(required, site.incarnation)
    policy = HandoffPolicy(args.decode_fallback, args.remote_prefill_min_tokens)
    tokens = RemotePrefillTokens(ranks, peers, handoffs, policy)
    services = [site.inference(site.text(tokens)), admin_service(ranks)]
    return Parts(services, tokens.loads, [peers.watch()], peers.first_look)

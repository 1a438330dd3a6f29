"""What makes a node fused: prompts and answers on its own rank."""

from __future__ import annotations

import logging

from pdserve import node
from pdserve.config import ServerArgs, policy_line
from pdserve.engine.local_tokens import LocalTokens
from pdserve.node import Parts, Site
from pdserve.rpc.admin import admin_service

log = logging.getLogger(__name__)


def run(args: ServerArgs) -> None:
    """Serve until stopped."""
    node.run(args, build, has_transport=False)


def build(site: Site) -> Parts:
    log.info("%s", policy_line(site.args))
    tokens = LocalTokens(site.ranks)
    return Parts([site.inference(site.text(tokens)), admin_service(site.ranks)], tokens.loads)

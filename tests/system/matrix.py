"""What the rows of the failure matrix share: a pair whose control channel lies open, and prompts that are new to it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from random import Random

from pdserve.config import Role
from tests.system.conftest import NUM_BYTES
from tests.system.control import Control
from tests.system.nodes import CHUNK, Node, Nodes, wait_until_connected, wait_until_serving

NUM_NEW = 6
# Enough chunks to do something in the middle of.
LONG = 24 * CHUNK
# Far from its end when it is disturbed, however late the test comes to its turn; the pool holds it twice, as it must
# when a READ of the first blocks may still be under way.
FAR = 3 * LONG
# Short, so that a test may outwait it.
LEASE_S = 4.0
NUM_SLOTS, NUM_QUEUED = 3, 8
SETTINGS = {"num_kv_blocks": 640, "max_num_seqs": NUM_SLOTS, "max_queued_requests": NUM_QUEUED}

_numbers = itertools.count()


def new_prompt(length: int = LONG) -> list[int]:
    """One that no node has seen."""
    random = Random(f"matrix {next(_numbers)}")
    return [random.randrange(NUM_BYTES) for _ in range(length)]


@dataclass
class Watched:
    """A prefill and a decode node; the latter reaches the former through `control`."""

    prefill: Node
    decode: Node
    control: Control

    def settle(self) -> None:
        """Until neither has anything left of any request."""
        self.decode.wait_until_quiet()
        self.prefill.wait_until_quiet()

    def end(self) -> None:
        self.decode.process.end()
        self.prefill.process.end()
        self.control.close()


def begin_prefill(nodes: Nodes, ucx_tls: str | None, **settings: object) -> Node:
    return nodes.begin(Role.PREFILL, ucx_tls=ucx_tls, **{"kv_lease_s": LEASE_S, **SETTINGS, **settings})


def begin_decode(nodes: Nodes, ucx_tls: str | None, peer: str, **settings: object) -> Node:
    mine = {"transfer_timeout_s": 3.0, "prefill_peers": (peer,), **SETTINGS, **settings}
    return nodes.begin(Role.DECODE, ucx_tls=ucx_tls, **mine)


def watched_pair(nodes: Nodes, ucx_tls: str | None, lease_s: float = LEASE_S, **of_decode: object) -> Watched:
    prefill = begin_prefill(nodes, ucx_tls, kv_lease_s=lease_s)
    control = Control(prefill.address)
    decode = begin_decode(nodes, ucx_tls, control.address, **of_decode)
    for node in (prefill, decode):
        wait_until_serving(node)
    wait_until_connected(decode)
    return Watched(prefill, decode, control)


def assert_pair_works(watched: Watched, whole: Node) -> None:
    prompt = new_prompt(3 * CHUNK)
    answer = watched.decode.ask(prompt, NUM_NEW)
    assert answer.token_ids == whole.ask(prompt, NUM_NEW).token_ids
    assert answer.placement == f"remote;peer={watched.control.address}"
    watched.settle()

"""Nodes in two network namespaces, with one link between them: the demo's prompts, and a link that is cut."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from pdserve.config import Role
from pdserve.demo_prompts import PROMPTS
from pdserve.errors import NotReady
from pdserve.model import hub
from tests.system.conftest import Greedy
from tests.system.nodes import Node, Nodes, wait_until_connected, wait_until_serving
from tests.system.test_life import long_answer
from tests.system.test_nnodes import GATE, asked_all, begin_group, wait_until_it_serves_again

pytestmark = [pytest.mark.system, pytest.mark.soak]

NAMESPACE, LINK, ITS_LINK = "pdserve-test", "pdserve-t0", "pdserve-t1"
HERE, THERE = "10.213.77.1", "10.213.77.2"


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def namespace() -> Iterator[Sequence[str]]:
    """Another network than ours, with one link between them: how to run a command in it."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    ip("netns", "add", NAMESPACE)
    try:
        ip("link", "add", LINK, "type", "veth", "peer", "name", ITS_LINK, "netns", NAMESPACE)
        ip("address", "add", f"{HERE}/30", "dev", LINK)
        ip("link", "set", LINK, "up")
        for words in (("address", "add", f"{THERE}/30", "dev", ITS_LINK), ("link", "set", ITS_LINK, "up")):
            ip("-n", NAMESPACE, *words)
        ip("-n", NAMESPACE, "link", "set", "lo", "up")
        yield ("ip", "netns", "exec", NAMESPACE)
    finally:
        ip("netns", "delete", NAMESPACE)


def test_a_group_across_a_link_answers_as_one_and_comes_back_after_the_link_was_cut(
    namespace: Sequence[str], mixtral: Path, mixtral_greedy: Greedy, tmp_path: Path
) -> None:
    nodes = Nodes(str(mixtral), tmp_path)
    try:
        group = begin_group(nodes, Role.FUSED, HERE, namespace, **GATE)
        headless = group.begin_headless()
        wait_until_serving(group.first)
        asked_all(group.first, mixtral_greedy)
        with group.first.client() as client:
            stream = long_answer(client)
            ip("link", "set", LINK, "down")
            with pytest.raises(NotReady, match=r"which is gone|no round was finished"):
                list(stream)
        ip("link", "set", LINK, "up")
        wait_until_it_serves_again(group.first)
        asked_all(group.first, mixtral_greedy, seed=1)
        assert headless.process.exit_status is None
    finally:
        nodes.end()


def test_kv_crosses_a_link_and_prompts_are_prefilled_at_home_while_it_is_cut(
    namespace: Sequence[str], mixtral: Path, mixtral_greedy: Greedy, tmp_path: Path
) -> None:
    nodes = Nodes(str(mixtral), tmp_path)
    sockets = {"ucx_tls": "tcp,self", "insecure": True}
    try:
        prefill = nodes.begin(Role.PREFILL, host=THERE, inside=namespace, data_parallel_size=2, **sockets)
        decode = nodes.begin(Role.DECODE, host=HERE, prefill_peers=(prefill.address,), **sockets)
        for node in (prefill, decode):
            wait_until_serving(node)
        wait_until_connected(decode)
        remote = f"remote;peer={prefill.address}"
        assert set(asked_all(decode, mixtral_greedy)) == {remote}
        ip("link", "set", LINK, "down")
        assert all(placement.startswith("local") for placement in asked_all(decode, mixtral_greedy, seed=1))
        ip("link", "set", LINK, "up")
        wait_until_connected(decode)
        assert set(asked_all(decode, mixtral_greedy, seed=2)) == {remote}
    finally:
        nodes.end()


DEMO = {"block_size": 64, "chunked_prefill_size": 512, "num_kv_blocks": 192}
NUM_DEMO_TOKENS = 24


def demo_answers(node: Node) -> list[tuple[int, ...]]:
    """Greedy answers to the demo's prompts, one after the other."""
    with node.client() as client:
        prompts = [client.tokenize(messages=[{"role": "user", "content": prompt.text}]) for prompt in PROMPTS]
    return [node.ask(prompt, NUM_DEMO_TOKENS).token_ids for prompt in prompts]


def test_the_demos_prompts_are_answered_across_a_link_as_by_one_node(namespace: Sequence[str], tmp_path: Path) -> None:
    nodes = Nodes(str(hub.resolve("smollm2")), tmp_path)
    sockets = {"ucx_tls": "tcp,self", "insecure": True, **DEMO}
    try:
        alone = nodes.start(Role.FUSED, **DEMO)
        expected = demo_answers(alone)
        alone.kill()
        group = begin_group(nodes, Role.FUSED, HERE, namespace, **GATE, **DEMO)
        group.begin_headless()
        wait_until_serving(group.first)
        assert demo_answers(group.first) == expected
        group.first.kill()
        prefill = nodes.begin(Role.PREFILL, host=THERE, inside=namespace, **sockets)
        decode = nodes.begin(Role.DECODE, host=HERE, prefill_peers=(prefill.address,), **sockets)
        for node in (prefill, decode):
            wait_until_serving(node)
        wait_until_connected(decode)
        assert demo_answers(decode) == expected
        assert decode.load().counters["remote_prefills_total"] == len(PROMPTS)
        ip("link", "set", LINK, "down")
        assert demo_answers(decode) == expected
    finally:
        nodes.end()

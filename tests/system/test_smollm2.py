"""The embedded model: real prompts answered as transformers does, by a fused node and by a pair."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.config import Role
from pdserve.model import hub
from tests.system.conftest import Greedy, reference
from tests.system.nodes import Node, Nodes, wait_until_serving

pytestmark = pytest.mark.system

NUM_NEW = 16
SETTINGS = {"block_size": 64, "chunked_prefill_size": 64, "num_kv_blocks": 16}
PROMPTS = (
    "What is the capital of France, and which river flows through it?",
    "Summarise in one sentence. " + "A node that is asked to stop lets its running answers finish. " * 12,
)


@pytest.fixture(scope="module")
def directory() -> Path:
    return hub.resolve("smollm2")


@pytest.fixture(scope="module")
def greedy(directory: Path) -> Greedy:
    return reference(directory)


@pytest.fixture(scope="module")
def smollm2_nodes(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """A fused node, and a decode node with its prefill node."""
    nodes = Nodes(str(directory), tmp_path_factory.mktemp("smollm2-nodes"))
    try:
        fused = nodes.begin(Role.FUSED, **SETTINGS)
        _, decode = nodes.start_pair(**SETTINGS)
        wait_until_serving(fused)
        yield fused, decode
    finally:
        nodes.end()


@pytest.mark.parametrize("prompt", PROMPTS, ids=["one chunk", "several chunks"])
def test_real_prompts_are_answered_as_transformers_does(
    smollm2_nodes: tuple[Node, Node], greedy: Greedy, prompt: str
) -> None:
    fused, decode = smollm2_nodes
    with fused.client() as client:
        tokens = client.tokenize(messages=[{"role": "user", "content": prompt}])
    expected = greedy(tokens, NUM_NEW)
    assert fused.ask(tokens, NUM_NEW).token_ids == expected
    answer = decode.ask(tokens, NUM_NEW)
    assert answer.token_ids == expected
    assert answer.placement.startswith("remote")

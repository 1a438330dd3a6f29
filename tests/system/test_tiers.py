"""The host and the file tier of real nodes: the answers of a node that needs neither, after kills and restarts too."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from pdserve.client import Answer
from pdserve.config import Role
from tests.system.conftest import NUM_BYTES
from tests.system.nodes import BLOCK_SIZE, Node, Nodes, wait_for

pytestmark = pytest.mark.system

HOST_GB = 0.02
NUM_NEW = 120
# Eight answers of up to 13 blocks each.
NUM_STREAMS = 8
NUM_BLOCKS_NEEDED = NUM_STREAMS * 13

Asked = tuple[list[int], dict[str, object]]


def prompt_of(length: int, seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(NUM_BYTES) for _ in range(length)]


def streams() -> list[Asked]:
    """Greedy and drawn answers, with penalties, whose state has to come back with them."""
    drawn = {"temperature": 0.8, "seed": 5, "frequency_penalty": 0.4, "repetition_penalty": 1.1}
    return [
        (prompt_of(40 + 6 * number, number), drawn if number % 2 else {"temperature": 0.0})
        for number in range(NUM_STREAMS)
    ]


def ask_all(node: Node, asked: list[Asked], max_new_tokens: int) -> list[Answer]:
    """All at once."""

    def ask(one: Asked) -> Answer:
        prompt, sampling = one
        with node.client() as client:
            return client.generate(token_ids=prompt, max_new_tokens=max_new_tokens, ignore_eos=True, **sampling)  # type: ignore[arg-type]

    with ThreadPoolExecutor(len(asked)) as threads:
        return list(threads.map(ask, asked))


def token_ids(answers: list[Answer]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]


def test_a_third_of_the_blocks_gives_the_same_tokens_and_computes_no_prompt_twice(nodes: Nodes, fused: Node) -> None:
    wanted = token_ids(ask_all(fused, streams(), NUM_NEW))
    node = nodes.start(Role.FUSED, num_kv_blocks=NUM_BLOCKS_NEEDED // 3, max_model_len=400, host_kv_gb=HOST_GB)
    assert token_ids(ask_all(node, streams(), NUM_NEW)) == wanted
    node.wait_until_quiet()
    counters = node.load().counters
    assert counters["retractions"] == counters["restores"] > 0
    assert counters["prompt_tokens_computed"] == sum(len(prompt) for prompt, _ in streams())


# ---------------------------------------------------------------- files

PROMPTS = [prompt_of(10 * BLOCK_SIZE + 1, 100 + number) for number in range(6)]


def filed(directory: Path, **settings: object) -> dict[str, object]:
    """A pool and a host tier that hold about one of the prompts each."""
    return {"num_kv_blocks": 16, "max_model_len": 256, "host_kv_gb": 0.0002, "kv_dir": str(directory), **settings}


def ask_each(node: Node) -> list[Answer]:
    return [node.ask(prompt) for prompt in PROMPTS]


def cached(answers: list[Answer]) -> int:
    return sum(answer.usage.num_cached_tokens for answer in answers)


def test_prefixes_in_files_survive_a_kill_while_they_are_written_and_are_never_wrong(
    nodes: Nodes, fused: Node, tmp_path: Path
) -> None:
    directory = tmp_path / "kv"
    wanted = token_ids(ask_each(fused))
    node = nodes.start(Role.FUSED, on_rank_death="exit", **filed(directory))

    def finds_what_it_wrote() -> bool:
        # A prefix is found from its first block on, and that is written last; others are being written meanwhile.
        assert token_ids(ask_each(node)) == wanted
        return node.load().counters["storage:hits"] > 0

    wait_for(finds_what_it_wrote, lambda: node.log)
    os.kill(node.rank_pid, signal.SIGKILL)
    node.wait_until_ended()
    node = nodes.start(Role.FUSED, **filed(directory))
    answers = ask_each(node)
    assert token_ids(answers) == wanted
    counters = node.load().counters
    assert counters["storage:hits"] > 0
    assert counters["storage:corrupt"] == 0
    assert cached(answers) > 0


def test_nodes_share_a_directory_and_one_of_another_block_size_finds_nothing_in_it(
    nodes: Nodes, fused: Node, tmp_path: Path
) -> None:
    directory = tmp_path / "kv"
    wanted = token_ids(ask_each(fused))
    # Nothing leaves memory before it was written: every whole block of a prompt is found.
    settings = filed(directory, num_kv_blocks=100, host_kv_gb=HOST_GB)
    first = nodes.begin(Role.FUSED, **settings)
    second = nodes.begin(Role.FUSED, **settings)
    other = nodes.start(Role.FUSED, **{**settings, "block_size": 2 * BLOCK_SIZE})
    for node in (first, second):
        wait_for(node.process.is_serving, lambda node=node: node.log)
    assert token_ids(ask_each(first)) == wanted
    wait_for(lambda: first.load().counters["storage:stored"] >= len(PROMPTS) * 10, lambda: first.log)
    answers = ask_each(second)
    assert token_ids(answers) == wanted
    assert cached(answers) == len(PROMPTS) * 10 * BLOCK_SIZE
    answers = ask_each(other)
    assert (token_ids(answers), cached(answers)) == (wanted, 0)
    assert other.load().counters["storage:hits"] == 0

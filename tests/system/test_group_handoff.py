"""Prefill and decode nodes of several ranks, split alike or not: the same answers as transformers, each byte once."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pdserve.bench.processes import children
from pdserve.config import Role
from tests.system.conftest import NUM_BYTES, Greedy, Pair
from tests.system.nodes import BLOCK_SIZE, CHUNK, Node, Nodes, wait_for, wait_until_connected, wait_until_serving

pytestmark = pytest.mark.system

NUM_NEW = 12
LENGTHS = (1, BLOCK_SIZE - 1, 2 * BLOCK_SIZE, CHUNK + 1, 3 * CHUNK + 3, 5, 40, 100)
NUM_LAYERS = 3
# Keys and values of 2 heads of 16 numbers of 4 bytes, in each layer, for each token of a block.
BLOCK_BYTES = 2 * NUM_LAYERS * 2 * 16 * 4 * BLOCK_SIZE


@dataclass(frozen=True, slots=True)
class Split:
    """Ranks of the prefill and of the decode node, each as (data parallel, tensor parallel)."""

    prefill: tuple[int, int]
    decode: tuple[int, int]

    @property
    def reads_a_block(self) -> int:
        """Descriptors that carry one block: a whole part, or its planes where two parts have only some heads alike."""
        larger, smaller = max(self.prefill[1], self.decode[1]), min(self.prefill[1], self.decode[1])
        return larger * (1 if larger == smaller else 2 * NUM_LAYERS)


SPLITS = {
    "two halves into each of two ranks": Split((1, 2), (2, 1)),
    "either of two ranks into two halves": Split((2, 1), (1, 2)),
}


def sized(grid: tuple[int, int]) -> dict[str, Any]:
    return {"data_parallel_size": grid[0], "tensor_parallel_size": grid[1]}


# One way by default, the other in `make soak-handoff`.
BOTH_WAYS = [pytest.param(name, marks=[] if index == 0 else pytest.mark.soak) for index, name in enumerate(SPLITS)]


@pytest.fixture(scope="module", params=BOTH_WAYS)
def split(request: pytest.FixtureRequest) -> Split:
    return SPLITS[request.param]


@pytest.fixture(scope="module")
def grouped(mixtral: Path, split: Split, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    nodes = Nodes(str(mixtral), tmp_path_factory.mktemp("logs"))
    try:
        prefill = nodes.begin(Role.PREFILL, **sized(split.prefill))
        decode = nodes.begin(Role.DECODE, prefill_peers=(prefill.address,), **sized(split.decode))
        for node in (prefill, decode):
            wait_until_serving(node)
        wait_until_connected(decode)
        yield prefill, decode
    finally:
        nodes.end()


def counted(node: Node) -> Counter[str]:
    """Over all ranks."""
    return sum((Counter(load.counters) for load in node.loads()), Counter[str]())


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [Random(f"group handoff {seed} {length}").randrange(NUM_BYTES) for _ in range(length)]


def test_groups_answer_as_transformers_does_and_every_byte_of_kv_crosses_once(
    grouped: Pair, split: Split, mixtral_greedy: Greedy
) -> None:
    prefill, decode = grouped
    prompts = [prompt_of(length) for length in LENGTHS]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: decode.ask(prompt, NUM_NEW), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == mixtral_greedy(prompt, NUM_NEW), f"{len(prompt)} tokens"
        assert answer.placement == f"remote;peer={prefill.address}"
    decode.wait_until_quiet()
    prefill.wait_until_quiet()
    num_blocks = sum(-(-length // BLOCK_SIZE) for length in LENGTHS)
    counters = counted(decode)
    assert counters["remote_prefills_total"] == counters["kv_transfers_total"] == len(prompts)
    assert counters["kv_bytes_total"] == num_blocks * BLOCK_BYTES
    assert counters["kv_descriptors_total"] == num_blocks * split.reads_a_block
    assert counters["prompt_tokens_computed"] == counters["decode_fallback_total"] == 0
    assert all(load.counters["output_tokens"] for load in (*prefill.loads(), *decode.loads()))
    for node in (prefill, decode):
        assert "Traceback" not in node.log


def test_what_a_rank_decoded_before_is_not_pulled_again(grouped: Pair, mixtral_greedy: Greedy) -> None:
    prefill, decode = grouped
    last = len(decode.loads()) - 1
    first = prompt_of(3 * CHUNK, seed=1)
    longer = [*first, *prompt_of(2 * BLOCK_SIZE, seed=2)]
    before = counted(decode)["kv_bytes_total"]
    for prompt, num_blocks in ((first, 3 * CHUNK // BLOCK_SIZE), (longer, 2)):
        answer = decode.ask(prompt, NUM_NEW, data_parallel_rank=last)
        assert answer.token_ids == mixtral_greedy(prompt, NUM_NEW)
        assert answer.placement == f"remote;peer={prefill.address}"
        decode.wait_until_quiet()
        after = counted(decode)["kv_bytes_total"]
        assert after - before == num_blocks * BLOCK_BYTES
        before = after


@pytest.mark.soak
def test_with_one_process_of_a_prefill_group_all_of_it_is_lost_and_its_prompts_are_prefilled_elsewhere(
    grouped: Pair, mixtral_greedy: Greedy
) -> None:
    prefill, decode = grouped
    pids = children(prefill.process.pid)
    prompts = [prompt_of(20 * CHUNK, seed=seed) for seed in range(4)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(decode.ask, prompt, NUM_NEW) for prompt in prompts]
        wait_for(lambda: any(load.num_open_transfers for load in decode.loads()), lambda: decode.log)
        os.kill(sorted(pids)[-1], signal.SIGKILL)
        answers = [future.result() for future in asked]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == mixtral_greedy(prompt, NUM_NEW)
    decode.wait_until_quiet()
    wait_until_serving(prefill)
    wait_until_connected(decode)
    prefill.wait_until_quiet()
    answer = decode.ask(prompt_of(50, seed=9), NUM_NEW)
    assert answer.token_ids == mixtral_greedy(prompt_of(50, seed=9), NUM_NEW)
    assert answer.placement == f"remote;peer={prefill.address}"

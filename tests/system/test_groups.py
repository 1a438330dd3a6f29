"""Nodes of several ranks: the same answers as transformers, and one rank's death is everybody's, once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest

from pdserve.bench.processes import children
from pdserve.config import Role
from pdserve.errors import InvalidRequest, NotReady
from pdserve.request import FinishReason
from pdserve.rounds import NUM_KEPT, GateDecision, Round
from tests.system.conftest import NUM_BYTES, Greedy
from tests.system.nodes import BLOCK_SIZE, CHUNK, Node, Nodes, wait_for
from tests.system.test_life import long_answer

pytestmark = pytest.mark.system

NUM_NEW = 12
LENGTHS = (1, BLOCK_SIZE - 1, 2 * BLOCK_SIZE, CHUNK + 1, 3 * CHUNK + 3, 5, 40, 100)
GATE = {"prefill_attempt_interval": 2, "prefill_any_attempt_interval": 6}


@pytest.fixture(scope="module")
def grid(mixtral: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Two data-parallel ranks of two processes each, with a gate."""
    nodes = Nodes(str(mixtral), tmp_path_factory.mktemp("logs"))
    try:
        yield nodes.start(Role.FUSED, data_parallel_size=2, tensor_parallel_size=2, **GATE)
    finally:
        nodes.end()


def prompt_of(length: int) -> list[int]:
    return [Random(f"groups {length}").randrange(NUM_BYTES) for _ in range(length)]


def test_a_grid_of_ranks_with_experts_and_a_gate_answers_as_transformers_does(
    grid: Node, mixtral_greedy: Greedy
) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: grid.ask(prompt, NUM_NEW), prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == mixtral_greedy(prompt, NUM_NEW), f"{len(prompt)} tokens"
    grid.wait_until_quiet()
    first, second = grid.loads()
    assert (first.rank, second.rank) == (0, 1)
    for load in (first, second):
        assert load.counters["output_tokens"] == NUM_NEW * len(prompts) // 2
    # They went through the same rounds, and are at rest.
    assert first.counters["group_rounds_total"] == second.counters["group_rounds_total"]
    assert "Traceback" not in grid.log


def test_a_request_that_names_its_rank_gets_it_and_the_other_only_takes_part(
    grid: Node, mixtral_greedy: Greedy
) -> None:
    grid.wait_until_quiet()
    before = grid.loads()
    prompt = prompt_of(30)
    for _ in range(3):
        assert grid.ask(prompt, NUM_NEW, data_parallel_rank=1).token_ids == mixtral_greedy(prompt, NUM_NEW)
    grid.wait_until_quiet()
    after = grid.loads()
    drawn = [
        one.counters["output_tokens"] - other.counters["output_tokens"]
        for one, other in zip(after, before, strict=True)
    ]
    assert drawn == [0, 3 * NUM_NEW]
    with pytest.raises(InvalidRequest, match="data_parallel_rank is 2, this node has ranks 0 to 1"):
        grid.ask(prompt, NUM_NEW, data_parallel_rank=2)


def test_logprobs_of_output_and_prompt_come_through_a_grid(grid: Node) -> None:
    prompt = prompt_of(CHUNK + 9)
    answers = [
        grid.ask(prompt, 3, logprobs=True, top_logprobs=2, prompt_logprobs=1, data_parallel_rank=rank)
        for rank in (0, 1)
    ]
    for answer in answers:
        assert answer.prompt_logprobs is not None
        assert (len(answer.logprobs), len(answer.prompt_logprobs)) == (3, len(prompt) - 1)
    assert answers[0].token_ids == answers[1].token_ids


def test_the_rounds_of_a_group_are_in_step_and_show_where_its_gate_opened(grid: Node) -> None:
    """While both ranks decode, a prompt that only one of them has waits for the ANY point."""
    grid.wait_until_quiet()
    (before, _) = grid.loads()
    with grid.client() as client:
        streams = [long_answer(client), long_answer(client)]  # one on each
        grid.ask(prompt_of(CHUNK), 2, data_parallel_rank=0)
        for stream in streams:
            stream.close()
        grid.wait_until_quiet()
        first_new = before.counters["group_rounds_total"] + 1
        by_rank: list[dict[int, Round]] = [{}, {}]
        for batch in client.rounds(last=NUM_KEPT):
            by_rank[batch.rank] |= {one.step: one for one in batch.rounds if one.step >= first_new}
    first, second = by_rank
    steps = sorted(first.keys() & second.keys())
    assert steps == list(range(first_new, first_new + len(steps)))
    for step in steps:
        one, other = first[step], second[step]
        assert one.group_number == other.group_number == step
        assert (one.decision, one.num_largest_tokens) == (other.decision, other.num_largest_tokens)
        assert (one.forward_us is None) == (other.forward_us is None)  # a rank without rows takes part
    (window,) = [one for one in first.values() if one.num_prefill_tokens == CHUNK]
    assert (window.decision, window.is_held, second[window.step].num_prefill_rows) == (GateDecision.ANY, False, 0)
    held = [one.step for one in first.values() if one.is_held and one.step < window.step]
    assert window.step - 1 in held
    assert not any(one.is_held for one in second.values() if one.step in held)


def test_ranks_that_split_a_dense_model_s_mlps_answer_as_transformers_does(nodes: Nodes, tiny_greedy: Greedy) -> None:
    """Both ranks at once, and one of them while the other only takes part."""
    node = nodes.start(Role.FUSED, data_parallel_size=2, dense_mlp_split=True)
    prompts = [prompt_of(length) for length in LENGTHS]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: node.ask(prompt, NUM_NEW), prompts))
    node.wait_until_quiet()
    (before, _) = node.loads()
    answers.append(node.ask(prompts[3], NUM_NEW, data_parallel_rank=1))
    for prompt, answer in zip([*prompts, prompts[3]], answers, strict=True):
        assert answer.token_ids == tiny_greedy(prompt, NUM_NEW), f"{len(prompt)} tokens"
    node.wait_until_quiet()
    first, second = node.loads()
    assert first.counters["group_rounds_total"] == second.counters["group_rounds_total"]
    num_idle = first.counters["group_idle_rounds_total"] - before.counters["group_idle_rounds_total"]
    assert num_idle >= NUM_NEW


# (data parallel, tensor parallel, which of the processes)
KILLS = {
    "one of two data-parallel ranks": (2, 1, 1),
    "a tensor-parallel follower": (1, 2, 1),
    "one of four": (2, 2, 2),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if index == 0 else pytest.mark.soak) for index, name in enumerate(KILLS)]
)
def test_a_killed_process_fails_the_groups_requests_at_once_and_the_group_comes_back(
    mixtral: Path, mixtral_greedy: Greedy, tmp_path: Path, name: str
) -> None:
    dp_size, tp_size, number = KILLS[name]
    nodes = Nodes(str(mixtral), tmp_path)
    try:
        node = nodes.start(Role.FUSED, data_parallel_size=dp_size, tensor_parallel_size=tp_size)
        pids = children(node.process.pid)
        assert len(pids) == dp_size * tp_size
        with node.client() as client, node.client() as other:
            streams = [long_answer(client), long_answer(other)]
            os.kill(sorted(pids)[number], signal.SIGKILL)
            for stream in streams:
                with pytest.raises(NotReady, match=r"the process of rank \d ended with status -9"):
                    list(stream)
        wait_for(lambda: "serving again with a new rank" in node.log, lambda: node.log)
        wait_for(node.process.is_serving, lambda: node.log)
        assert "Traceback" not in node.log
        assert not set(pids) & set(children(node.process.pid))
        prompt = prompt_of(50)
        answer = node.ask(prompt, NUM_NEW)
        assert (answer.token_ids, answer.finish) == (mixtral_greedy(prompt, NUM_NEW), FinishReason.LENGTH)
        node.wait_until_quiet()
    finally:
        nodes.end()


def test_a_model_that_cannot_be_split_so_is_refused_before_any_rank_starts(mixtral: Path, tmp_path: Path) -> None:
    nodes = Nodes(str(mixtral), tmp_path)
    try:
        node = nodes.begin(Role.FUSED, tensor_parallel_size=3, max_num_seqs=8)
        assert node.wait_until_ended() == 2
        assert "--tensor-parallel-size is 3, the model has 4 attention heads" in node.log
        node = nodes.begin(Role.FUSED, data_parallel_size=8)
        assert node.wait_until_ended() == 2
        assert "the model has 4 experts to split over its ranks: lower it to 4 or less" in node.log
        node = nodes.begin(Role.FUSED, data_parallel_size=2, dense_mlp_split=True)
        assert node.wait_until_ended() == 2
        assert "--dense-mlp-split: every layer of the model is a mixture of experts" in node.log
    finally:
        nodes.end()

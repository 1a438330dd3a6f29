"""Serving requests through a runner without a scheduler: chunks, mixed rounds, scattered blocks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from pdserve.kv.storage import KVStorage
from pdserve.model.runner import ModelRunner
from pdserve.request import BlockId, RequestId, SamplingParams, TokenLogprobs, TokenRequest
from pdserve.scheduler.plan import RoundPlan, Row, SlotStart


@dataclass
class Answer:
    """What one request got."""

    request: TokenRequest
    slot: int
    forced_output: tuple[int, ...] = ()
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_computed: int = 0
    num_blocks: int = 0

    @property
    def num_known(self) -> int:
        return len(self.request.prompt) + len(self.forced_output) + len(self.output)

    @property
    def is_finished(self) -> bool:
        return len(self.forced_output) + len(self.output) >= self.request.sampling.max_new_tokens


class Server:
    """Rounds of one prefill chunk beside every running decode; blocks are given out in random order, never back."""

    def __init__(self, runner: ModelRunner, storage: KVStorage, chunk: int = 7) -> None:
        self.runner = runner
        self.block_size = storage.layout.block_size
        self.chunk = chunk
        self.free = [BlockId(block) for block in range(storage.num_blocks)]
        random.Random(storage.num_blocks).shuffle(self.free)
        self.round_id = 0

    def serve(self, requests: Sequence[TokenRequest], forced: Sequence[tuple[int, ...]] = ()) -> list[Answer]:
        """Every request to its max_new_tokens; request i has slot i."""
        forced = forced or [()] * len(requests)
        answers = [Answer(request, slot, forced[slot]) for slot, request in enumerate(requests)]
        while waiting := [answer for answer in answers if not answer.is_finished]:
            self.run_round(waiting)
        return answers

    def run_round(self, live: Sequence[Answer]) -> None:
        prefilling = [answer for answer in live if answer.num_computed < answer.num_known - 1][:1]
        decoding = [answer for answer in live if answer.num_computed == answer.num_known - 1]
        starts = [answer for answer in prefilling + decoding if not answer.num_blocks]
        for answer in starts:
            self.runner.start(self._start(answer), answer.request)
        prefill = tuple(self._row(answer, self.chunk) for answer in prefilling)
        decode = tuple(self._row(answer, 1) for answer in decoding)
        plan = RoundPlan(self.round_id, tuple(map(self._start, starts)), prefill, decode)
        self.round_id += 1
        result = self.runner.execute(plan)
        by_id = {answer.request.request_id: answer for answer in live}
        for request_id, entries in result.prompt_logprobs.items():
            by_id[request_id].prompt_logprobs += entries
        assert len(result.tokens) == len(plan.sampled_rows)
        for index, (row, token) in enumerate(zip(plan.sampled_rows, result.tokens, strict=True)):
            by_id[row.request_id].output.append(token)
            if index in result.logprobs:
                by_id[row.request_id].logprobs.append(result.logprobs[index])

    def _start(self, answer: Answer) -> SlotStart:
        return SlotStart(answer.request.request_id, answer.slot, answer.forced_output)

    def _row(self, answer: Answer, limit: int) -> Row:
        start = answer.num_computed
        end = min(start + limit, answer.num_known)
        num_new = -(-end // self.block_size) - answer.num_blocks
        new_blocks = tuple(self.free.pop() for _ in range(num_new))
        answer.num_blocks += num_new
        answer.num_computed = end
        return Row(answer.request.request_id, answer.slot, start, end, new_blocks, end == answer.num_known)


def make_request(name: str, prompt: Sequence[int], max_new_tokens: int, **sampling: object) -> TokenRequest:
    """Greedy unless `sampling` says otherwise."""
    params = {"temperature": 0.0, **sampling}
    return TokenRequest(RequestId(name), tuple(prompt), SamplingParams(max_new_tokens, **params))  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def request_of() -> Callable[..., TokenRequest]:
    return make_request


@pytest.fixture(scope="session")
def server_of() -> type[Server]:
    return Server


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from threads, and lose much where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def two_threads(one_thread: None) -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache directory in which the attention kernel is built, once a test run."""
    return tmp_path_factory.mktemp("cache")

"""The decoder against transformers on the same random weights: logits and greedy tokens, through paged KV."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.kv.storage import KVStorage
from pdserve.model.attention.torch_cpu import TorchAttention
from pdserve.model.collectives import Collectives
from pdserve.model.llama import Llama
from pdserve.model.model_config import read_config
from pdserve.model.torch_runner import TorchRunner, load
from pdserve.model.weights import load_weights
from pdserve.request import TokenRequest
from tests.model.conftest import Answer
from tests.model.small_models import VARIANTS, save


@pytest.fixture(scope="module", params=VARIANTS, ids=str)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A transformers model with random weights, and its directory."""
    directory = tmp_path_factory.mktemp(request.param)
    return save(request.param, directory), directory


def build(directory: Path, cache_dir: Path, block_size: int = 16) -> tuple[TorchRunner, KVStorage]:
    config = read_config(directory)
    storage = KVStorage(config.kv_layout(block_size), 64)
    storage.slab.view(torch.float32).fill_(torch.nan)
    return load(directory, config, storage, max_slots=4, max_model_len=256, cache_dir=cache_dir), storage


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(6, 211, (count,), generator=generator).tolist() for count in (1, 23, 90)]


def test_greedy_tokens_and_logprobs_equal_transformers_in_chunks_over_scattered_blocks(
    reference: tuple[Any, Path], kernel_cache: Path, request_of: Callable[..., TokenRequest], server_of: Any
) -> None:
    model, directory = reference
    runner, storage = build(directory, kernel_cache)
    wants = {"num_logprobs": 210, "prompt_logprobs": 0}
    requests = [request_of(str(number), prompt, 12, **wants) for number, prompt in enumerate(prompts())]
    answers = server_of(runner, storage, chunk=13).serve(requests)
    for answer in answers:
        prompt = list(answer.request.prompt)
        with torch.inference_mode():
            expected = model(torch.tensor([prompt + answer.output])).logits[0].float()
        logprobs = expected.log_softmax(-1)
        assert answer.output == expected[len(prompt) - 1 : -1].argmax(-1).tolist()
        for position, entry in enumerate(answer.logprobs, start=len(prompt) - 1):
            ids = torch.tensor([token for token, _ in entry.top])
            ours = torch.tensor([value for _, value in entry.top])
            torch.testing.assert_close(ours, logprobs[position, ids], rtol=0, atol=1e-4)
            assert entry.top[0] == (entry.token_id, entry.logprob)
        for position, entry in enumerate(answer.prompt_logprobs):
            assert entry.token_id == prompt[position + 1]
            assert entry.logprob == pytest.approx(float(logprobs[position, entry.token_id]), abs=1e-4)
        assert len(answer.prompt_logprobs) == len(prompt) - 1


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    save("llama", directory)
    return directory


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(
    tiny: Path, kernel_cache: Path, request_of: Callable[..., TokenRequest], server_of: Any
) -> None:
    first, second, third = prompts()
    request = request_of("seeded", second, 10, temperature=0.9, top_p=0.95, seed=11)
    crowd = [request, request_of("greedy", third, 10), request_of("other", first, 10, temperature=1.5, seed=3)]
    alone = server_of(*build(tiny, kernel_cache), chunk=64).serve([request])[0].output
    assert server_of(*build(tiny, kernel_cache), chunk=5).serve(crowd)[0].output == alone
    other_sample = request_of("sample", second, 10, temperature=0.9, top_p=0.95, seed=11, sample_index=1)
    assert server_of(*build(tiny, kernel_cache)).serve([other_sample])[0].output != alone


def test_a_forced_output_continues_as_the_undisturbed_answer(
    tiny: Path, kernel_cache: Path, request_of: Callable[..., TokenRequest], server_of: Any
) -> None:
    sampling = {
        "temperature": 0.8,
        "seed": 5,
        "frequency_penalty": 0.7,
        "repetition_penalty": 1.3,
        "min_new_tokens": 9,
        "num_logprobs": 2,
        "prompt_logprobs": 1,
    }
    request = request_of("r", prompts()[1], 10, **sampling)
    whole = server_of(*build(tiny, kernel_cache)).serve([request])[0]
    for count in (1, 4):
        forced = tuple(whole.output[:count])
        rest = server_of(*build(tiny, kernel_cache)).serve([request], forced=[forced])[0]
        assert rest.output == whole.output[count:]
        assert [entry.token_id for entry in rest.logprobs] == [entry.token_id for entry in whole.logprobs[count:]]
        assert rest.prompt_logprobs == []


def test_a_reused_slot_remembers_nothing(
    tiny: Path, kernel_cache: Path, request_of: Callable[..., TokenRequest], server_of: Any
) -> None:
    heavy = request_of("a", prompts()[2], 8, temperature=2.0, presence_penalty=2.0, logit_bias=((9, 50.0),), seed=1)
    plain = request_of("b", prompts()[1], 8)
    server = server_of(*build(tiny, kernel_cache))
    server.serve([heavy])
    assert server.serve([plain])[0].output == server_of(*build(tiny, kernel_cache)).serve([plain])[0].output


@dataclass
class SharedMlp:
    """An Mlp that takes part in exchanges; remembers what it was called with."""

    is_shared: bool
    seen: list[tuple[int, ...]] = field(default_factory=list)

    def __call__(self, x: Tensor, collectives: Collectives) -> Tensor:
        self.seen.append(tuple(x.shape))
        return x


def test_an_idle_forward_calls_what_is_shared_and_nothing_else(tiny: Path) -> None:
    config = read_config(tiny)
    weights = load_weights(tiny, config)
    mlps = [SharedMlp(is_shared) for is_shared in (True, False, True)]
    layers = tuple(replace(layer, mlp=mlp) for layer, mlp in zip(weights.layers, mlps, strict=True))
    storage = KVStorage(config.kv_layout(16), 1)
    attention = TorchAttention(storage, config.num_heads)
    Llama(config, replace(weights, layers=layers), attention).idle_forward()
    assert [mlp.seen for mlp in mlps] == [[(0, 48)], [], [(0, 48)]]


def test_an_idle_runner_of_a_model_without_experts_leaves_everything_as_it_is(
    tiny: Path, kernel_cache: Path, request_of: Callable[..., TokenRequest], server_of: Any
) -> None:
    request = request_of("r", prompts()[1], 6)
    expected = server_of(*build(tiny, kernel_cache)).serve([request])[0].output
    runner, storage = build(tiny, kernel_cache)
    server = server_of(runner, storage)
    answer = Answer(request, 0)
    while not answer.is_finished:
        server.run_round([answer])
        runner.idle()
    assert answer.output == expected

"""A mixture made of copies answers as the dense model it was made of; with noise it does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from pdserve.errors import StartupError
from pdserve.model import hub
from pdserve.model.mixture import Mixture
from pdserve.model.model_config import read_config
from pdserve.model.torch_runner import load
from pdserve.model.upcycle import upcycle
from tests.model.conftest import Server, make_request
from tests.model.small_models import SMALL
from tests.model.tensor_parallel_ranks import options, storage_of

transformers = pytest.importorskip("transformers")

COMPANIONS = {"tokenizer.json": '{"version": "1.0"}', "tokenizer_config.json": "{}", "chat_template.jinja": "{{ x }}"}


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(2)
    directory = tmp_path_factory.mktemp("dense")
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=request.param)
    transformers.LlamaForCausalLM(config).save_pretrained(directory)
    for name, text in COMPANIONS.items():
        (directory / name).write_text(text)
    (directory / "manifest.json").write_text("{}")
    return directory


def made(dense: Path, directory: Path, mixture: Mixture | None = None) -> Path:
    directory.mkdir()
    upcycle(dense, directory, mixture or Mixture())
    return directory


def tokens() -> list[int]:
    return torch.randint(6, 211, (40,), generator=torch.Generator().manual_seed(5)).tolist()


def logits_of(directory: Path) -> Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([tokens()])).logits[0]
    return logits


def test_the_logits_are_those_of_the_dense_model(dense: Path, tmp_path: Path) -> None:
    torch.testing.assert_close(logits_of(made(dense, tmp_path / "moe")), logits_of(dense), rtol=0, atol=1e-4)


def test_noise_changes_them_as_far_as_its_scale(dense: Path, tmp_path: Path) -> None:
    expected = logits_of(dense)
    little, much = (
        (logits_of(made(dense, tmp_path / str(scale), Mixture(noise_scale=scale))) - expected).abs().max()
        for scale in (0.01, 0.3)
    )
    assert 1e-3 < little < much


def test_our_reader_serves_it_as_the_dense_model(dense: Path, tmp_path: Path, kernel_cache: Path) -> None:
    answers = [answer_of(directory, kernel_cache) for directory in (dense, made(dense, tmp_path / "moe"))]
    assert answers[0].output == answers[1].output
    ours, theirs = ([entry.logprob for entry in answer.prompt_logprobs] for answer in answers)
    assert ours == pytest.approx(theirs, abs=1e-4)


def answer_of(directory: Path, cache_dir: Path) -> Any:
    storage = storage_of(directory, 1)
    runner = load(directory, read_config(directory), storage, **options(cache_dir))
    return Server(runner, storage).serve([make_request("r", tokens(), 8, prompt_logprobs=0)])[0]


def test_the_config_says_what_was_made(dense: Path, tmp_path: Path) -> None:
    config = read_config(made(dense, tmp_path / "moe", Mixture(num_experts=3, num_experts_per_token=1)))
    assert config.experts is not None
    assert (config.experts.num_experts, config.experts.num_experts_per_token) == (3, 1)
    assert config.experts.renormalises
    was = read_config(dense)
    assert replace(config, architecture=was.architecture, experts=None) == was


def test_it_is_the_same_bytes_each_time_and_other_ones_for_another_seed(dense: Path, tmp_path: Path) -> None:
    def contents(name: str, seed: int) -> dict[str, bytes]:
        directory = made(dense, tmp_path / name, Mixture(noise_scale=0.1, seed=seed))
        return {path.name: path.read_bytes() for path in directory.glob("*.safetensors")}

    first, again, other = contents("a", 1), contents("b", 1), contents("c", 2)
    assert first == again
    assert len(first) == 5
    assert all(first[name] != other[name] for name in first)


def test_the_tokenizer_and_the_template_are_carried_over_and_no_other_model_s_index(
    dense: Path, tmp_path: Path
) -> None:
    directory = made(dense, tmp_path / "moe")
    for name, text in COMPANIONS.items():
        assert (directory / name).read_text() == text
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = {path.name for path in directory.iterdir()}
    assert set(index["weight_map"].values()) <= files
    assert files - set(index["weight_map"].values()) == {
        *COMPANIONS,
        "config.json",
        "generation_config.json",
        "model.safetensors.index.json",
    }


def test_another_family_is_refused_by_name(tmp_path: Path) -> None:
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL)).save_pretrained(tmp_path)
    with pytest.raises(StartupError, match=r"architectures is Qwen3ForCausalLM.*LlamaForCausalLM"):
        made(tmp_path, tmp_path / "moe")


PROMPTS = (
    "What is the capital of France?",
    "Explain in one sentence why the sky is blue.",
    "Write a haiku about a river in autumn. " * 6,
)


@pytest.mark.soak
def test_the_embedded_mixture_answers_as_the_embedded_model(kernel_cache: Path) -> None:
    def answers(name: str) -> list[list[int]]:
        directory = hub.resolve(name)
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        chats = [f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n" for prompt in PROMPTS]
        requests = [make_request(str(i), tokenizer.encode(chat).ids, 16) for i, chat in enumerate(chats)]
        storage = storage_of(directory, 1)
        runner = load(directory, read_config(directory), storage, **options(kernel_cache))
        return [answer.output for answer in Server(runner, storage, chunk=64).serve(requests)]

    assert answers("smollm2-moe") == answers("smollm2")

"""Ranks that each hold a slice of every matrix give the answers of transformers, as one rank with all of it does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.model.model_config import read_config
from pdserve.model.torch_runner import load
from tests.model.tensor_parallel_ranks import LIMIT_S, NUM_RANKS, Case, options, requests, serve, storage_of

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "vocab_size": 211,  # a prime: no number of ranks has equal parts of it
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 5,
    "bos_token_id": 1,
    # Wide enough that the best token leads clearly: rounding must not decide.
    "initializer_range": 0.15,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "mistral-tied": ("Mistral", {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2-bias": ("Qwen2", {}),
    "qwen3-norm": ("Qwen3", {"tie_word_embeddings": True}),
}
# Four ranks are more than the fewer KV heads: two ranks then hold the same one.
MODELS = [f"{family}-{num_kv_heads}" for family in FAMILIES for num_kv_heads in (2, 4)]
# A best token that leads by less may come second elsewhere, as sums of parts round differently.
TIE = 1e-3

Answers = list[dict[str, Any]]


def new_model(name: str, directory: Path) -> Any:
    """A transformers model with random weights (biases and norms too), saved to the directory."""
    family, num_kv_heads = name.rsplit("-", 1)
    kind, changes = FAMILIES[family]
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **changes, "num_key_value_heads": int(num_kv_heads)})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
        if "norm" in parameter_name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.save_pretrained(directory)
    return model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Path]]:
    made = {}
    for name in MODELS:
        directory = tmp_path_factory.mktemp(name)
        made[name] = new_model(name, directory), directory
    return made


def run_ranks(directory: Path, cache_dir: Path, cases: Sequence[Case]) -> dict[int, Answers]:
    """Answers by the number of the case; the processes have ended."""
    told = json.dumps([(case.directory, case.served_by) for case in cases])
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.model.tensor_parallel_ranks", str(directory), str(cache_dir), told],
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=2 * LIMIT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert process.returncode == 0, errors
    return {int(number): answers for number, answers in json.loads(out).items()}


@pytest.fixture(scope="module")
def answers(
    models: dict[str, tuple[Any, Path]], kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int], Answers]:
    """By model and number of ranks. Pairs of ranks share the models; then all four serve each."""
    found = {(name, 1): serve_alone(directory, kernel_cache) for name, (_, directory) in models.items()}
    keys = [(name, 2) for name in models] + [(name, 4) for name in models]
    ranks = [((0, 1), (2, 3))[number % 2] for number in range(len(models))] + [tuple(range(NUM_RANKS))] * len(models)
    cases = [Case(str(models[name][1]), held) for (name, _), held in zip(keys, ranks, strict=True)]
    told = run_ranks(tmp_path_factory.mktemp("ranks"), kernel_cache, cases)
    return found | {keys[number]: answers for number, answers in told.items()}


def serve_alone(directory: Path, cache_dir: Path) -> Answers:
    storage = storage_of(directory, 1)
    return serve(load(directory, read_config(directory), storage, **options(cache_dir)), storage)


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_and_logprobs_equal_transformers(
    models: dict[str, tuple[Any, Path]], answers: dict[tuple[str, int], Answers], name: str, tp_size: int
) -> None:
    model, _ = models[name]
    num_ties = 0
    for request, answer in zip(requests(), answers[name, tp_size], strict=True):
        prompt, output = list(request.prompt), answer["output"]
        assert len(output) == request.sampling.max_new_tokens
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0].float()
        logprobs = logits.log_softmax(-1)
        drawn_from = logprobs[len(prompt) - 1 : -1]
        of_output = drawn_from[range(len(output)), output]
        assert answer["logprobs"] == pytest.approx(of_output.tolist(), abs=1e-4)
        of_prompt = logprobs[range(len(prompt) - 1), prompt[1:]].tolist()
        assert [entry["token_id"] for entry in answer["prompt_logprobs"]] == prompt[1:]
        assert [entry["logprob"] for entry in answer["prompt_logprobs"]] == pytest.approx(of_prompt, abs=1e-4)
        if request.sampling.temperature == 0:
            lead = drawn_from.max(-1).values - of_output
            assert float(lead.max()) < TIE
            num_ties += int((lead > 0).sum())
    assert num_ties <= 1

"""Mixtures of experts answer as transformers does, on one rank and with their experts split over several."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.errors import StartupError
from pdserve.model.checkpoint import Checkpoint
from pdserve.model.collectives import Alone
from pdserve.model.experts import Expert, Experts, load_experts
from pdserve.model.linear import Linear
from pdserve.model.matrices import UNQUANTISED
from pdserve.model.mlp import DenseMlp
from pdserve.model.model_config import read_config
from pdserve.model.progress import no_progress
from pdserve.model.shard import Shard
from pdserve.model.torch_runner import load
from pdserve.model.weights import expected_shapes, load_weights
from tests.model.conftest import Server
from tests.model.expert_parallel_ranks import CHUNK, Case, requests
from tests.model.small_models import SMALL
from tests.model.tensor_parallel_ranks import LIMIT_S, NUM_RANKS, options, storage_of, told

transformers = pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]
# Six experts are not split evenly over four ranks.
QWEN3 = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-a-dense-layer": ("Qwen3Moe", {**QWEN3, "norm_topk_prob": True, "mlp_only_layers": [1]}),
    "qwen3-every-other-layer": ("Qwen3Moe", {**QWEN3, "norm_topk_prob": False, "decoder_sparse_step": 2}),
}
DENSE_LAYERS = {"mixtral": [], "qwen3-a-dense-layer": [1], "qwen3-every-other-layer": [0, 2]}
# A best token that leads by less may come second elsewhere, as sums of parts round differently.
TIE = 1e-3

LAYER = "model.layers.0."

Model = tuple[Any, Path]
Answers = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {name: new_model(name, tmp_path_factory.mktemp(name)) for name in VARIANTS}


def new_model(name: str, directory: Path) -> Model:
    """A transformers model with random weights, norms too, in which every expert is chosen now and then."""
    family, changes = VARIANTS[name]
    torch.manual_seed(7)
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**{**SMALL, **changes})
    ).eval()
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        if "mlp.gate.weight" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(directory)
    return model, directory


@pytest.fixture(scope="module")
def alone(models: dict[str, Model], kernel_cache: Path) -> dict[str, Answers]:
    """What one rank with the whole model answers."""
    return {name: serve_alone(directory, kernel_cache) for name, (_, directory) in models.items()}


def serve_alone(directory: Path, cache_dir: Path) -> Answers:
    storage = storage_of(directory, 1)
    runner = load(directory, read_config(directory), storage, **options(cache_dir))
    return {answer.request.request_id: told(answer) for answer in Server(runner, storage, CHUNK).serve(requests())}


def check_against_transformers(model: Any, answers: Answers) -> None:
    """Greedy tokens, but for a tie, and the log probabilities of what was drawn."""
    num_ties = 0
    for request in requests():
        prompt, output = list(request.prompt), answers[request.request_id]["output"]
        assert len(output) == request.sampling.max_new_tokens
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + output])).logits[0].float()
        drawn_from = logits.log_softmax(-1)[len(prompt) - 1 : -1]
        of_output = drawn_from[range(len(output)), output]
        assert answers[request.request_id]["logprobs"] == pytest.approx(of_output.tolist(), abs=1e-4)
        lead = drawn_from.max(-1).values - of_output
        assert float(lead.max()) < TIE
        num_ties += int((lead > 0).sum())
    assert num_ties <= 1


@pytest.mark.parametrize("name", VARIANTS)
def test_chunks_and_decodes_equal_transformers(models: dict[str, Model], alone: dict[str, Answers], name: str) -> None:
    check_against_transformers(models[name][0], alone[name])


@pytest.mark.parametrize("name", VARIANTS)
def test_the_layers_that_the_config_says_are_dense(models: dict[str, Model], name: str) -> None:
    directory = models[name][1]
    layers = load_weights(directory, read_config(directory)).layers
    dense = [index for index, layer in enumerate(layers) if isinstance(layer.mlp, DenseMlp)]
    assert dense == DENSE_LAYERS[name]
    assert [index for index, layer in enumerate(layers) if not layer.mlp.is_shared] == dense


# ---------------------------------------------------------------- over several ranks

GRIDS = [(1, 2), (1, 4), (2, 2)]  # (tp_size, ep_size)


@contextmanager
def rank_processes(rendezvous: Path, cache_dir: Path, cases: Sequence[Case]) -> Iterator[list[subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "tests.model.expert_parallel_ranks"]
    arguments = [str(rendezvous), str(cache_dir), json.dumps([astuple(case) for case in cases])]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(NUM_RANKS):
            processes.append(subprocess.Popen([*command, str(rank), *arguments], cwd=ROOT, env=environment, **pipes))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.fixture(scope="module")
def shared(
    models: dict[str, Model], alone: dict[str, Answers], tmp_path_factory: pytest.TempPathFactory, kernel_cache: Path
) -> dict[tuple[str, int, int], list[dict[str, Any]]]:
    """What each rank of a grid tells, in rank order, by model and grid; `alone` has built the kernel."""
    keys = [(name, *grid) for name in models for grid in GRIDS]
    cases = [Case(str(models[name][1]), tp_size, ep_size) for name, tp_size, ep_size in keys]
    with rank_processes(tmp_path_factory.mktemp("ranks") / "rendezvous", kernel_cache, cases) as processes:
        by_rank = []
        for process in processes:
            out, errors = process.communicate(timeout=2 * LIMIT_S)
            assert process.returncode == 0, errors
            by_rank.append(json.loads(out))
    by_case = zip(*by_rank, strict=True)
    return {key: [said for said in case if said is not None] for key, case in zip(keys, by_case, strict=True)}


def joined(said: list[dict[str, Any]]) -> Answers:
    return {request_id: answer for rank in said for request_id, answer in rank["answers"].items()}


@pytest.mark.parametrize("ep_size", [2, 4])
@pytest.mark.parametrize("name", VARIANTS)
def test_answers_are_the_same_bits_over_any_number_of_ranks(
    shared: dict[tuple[str, int, int], list[dict[str, Any]]], alone: dict[str, Answers], name: str, ep_size: int
) -> None:
    said = shared[name, 1, ep_size]
    assert len(said) == ep_size
    assert max(rank["num_idle"] for rank in said) > 0
    assert joined(said) == alone[name]


@pytest.mark.parametrize("name", VARIANTS)
def test_experts_in_slices_over_a_grid_answer_as_transformers_does(
    models: dict[str, Model], shared: dict[tuple[str, int, int], list[dict[str, Any]]], name: str
) -> None:
    said = shared[name, 2, 2]
    assert said[0] == said[1]
    assert said[2] == said[3]
    check_against_transformers(models[name][0], joined(said))


# ---------------------------------------------------------------- one layer


def new_experts(num_experts: int, num_per_token: int, renormalises: bool) -> Experts:
    torch.manual_seed(num_experts)
    experts = [
        Expert(Linear(torch.randn(96, 32) * 32**-0.5), Linear(torch.randn(32, 48) * 48**-0.5))
        for _ in range(num_experts)
    ]
    return Experts(Linear(torch.randn(num_experts, 32)), experts, num_per_token, renormalises)


@pytest.mark.parametrize("renormalises", [True, False])
@pytest.mark.parametrize(("num_experts", "num_per_token"), [(4, 2), (5, 1), (8, 3), (4, 4)])
def test_a_row_s_bits_do_not_depend_on_who_shares_its_round(
    num_experts: int, num_per_token: int, renormalises: bool
) -> None:
    experts, x = new_experts(num_experts, num_per_token, renormalises), torch.randn(40, 32)
    together = experts(x, Alone())
    for num_rows in (1, 2, 7):
        parts = [experts(part, Alone()) for part in x.split(num_rows)]
        assert torch.equal(torch.cat(parts), together), num_rows


def test_no_rows_are_no_rows() -> None:
    assert new_experts(4, 2, True)(torch.empty(0, 32), Alone()).shape == (0, 32)


class Counted(Alone):
    """One tensor-parallel rank's view: its part of the sum comes back as it is."""

    num_sums = 0

    def add_up(self, x: Tensor) -> Tensor:
        self.num_sums += 1
        return x


def load_layer(directory: Path, shard: Shard) -> Experts:
    """The first layer's."""
    config = read_config(directory)
    assert config.experts is not None
    return load_experts(
        Checkpoint(directory, expected_shapes(config), no_progress), config.experts, LAYER, shard, UNQUANTISED
    )


@pytest.mark.parametrize("tp_size", [2, 4])
def test_the_slices_of_tensor_parallel_ranks_sum_to_the_whole(models: dict[str, Model], tp_size: int) -> None:
    directory, x = models["mixtral"][1], torch.randn(9, 48)
    whole = load_layer(directory, Shard())(x, Alone())
    collectives = Counted()
    parts = [load_layer(directory, Shard(tp_size, rank))(x, collectives) for rank in range(tp_size)]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole, rtol=0, atol=1e-5)
    assert collectives.num_sums == tp_size
    assert (parts[0] - whole).abs().max() > 0.1


# ---------------------------------------------------------------- what a rank reads


@pytest.mark.parametrize("ep_size", [1, 2, 4])
def test_each_expert_is_read_by_one_rank_and_progress_ends_at_its_total(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch, ep_size: int
) -> None:
    read: Counter[str] = Counter()
    take = Checkpoint.take

    def watched(checkpoint: Checkpoint, name: str, *slices: range | None, **named: range | None) -> Tensor:
        read[name] += 1
        return take(checkpoint, name, *slices, **named)

    monkeypatch.setattr(Checkpoint, "take", watched)
    directory = models["qwen3-a-dense-layer"][1]
    config = read_config(directory)
    for rank in range(ep_size):
        told: list[tuple[int, int]] = []
        load_weights(
            directory, config, lambda _, *how_far, told=told: told.append(how_far), Shard(ep_size=ep_size, ep_rank=rank)
        )
        total = len(expected_shapes(config))
        assert told[-1] == (total, total)
        assert sum(done == total for done, _ in told) == 1
    assert read == {name: 1 if ".experts." in name else ep_size for name in expected_shapes(config)}


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        (Shard(ep_size=8), ["--data-parallel-size is 8", "4 experts", "lower it to 4"]),
        (Shard(tp_size=3), ["--tensor-parallel-size is 3", "80 neurons of an expert", "divisor of 80"]),
    ],
    ids=["a rank without experts", "unequal slices"],
)
def test_ranks_that_cannot_have_their_part_are_refused(
    models: dict[str, Model], shard: Shard, words: list[str]
) -> None:
    with pytest.raises(StartupError) as refusal:
        load_layer(models["mixtral"][1], shard)
    for word in words:
        assert word in refusal.value.message

"""Dense MLPs split over all ranks of a group: the answers of transformers, whoever has rows and however many."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.model.checkpoint import Checkpoint
from pdserve.model.collectives import Grid
from pdserve.model.mlp import DenseMlp, SplitMlp
from pdserve.model.model_config import read_config
from pdserve.model.shard import Shard
from pdserve.model.torch_runner import load
from pdserve.model.weights import expected_shapes, load_weights
from tests.model import test_experts
from tests.model.conftest import Server
from tests.model.expert_parallel_ranks import CHUNK, Case, requests
from tests.model.tensor_parallel_ranks import LIMIT_S, options, storage_of, told
from tests.model.test_experts import SMALL, Answers, Model, check_against_transformers, joined, rank_processes

transformers = pytest.importorskip("transformers")

MIXTURE = "qwen3-a-dense-layer"
NAMES = ["llama", MIXTURE]
GRIDS = [(1, 2), (1, 4), (2, 2)]  # (tp_size, ep_size)
# The longest request beside others, and while the other rank has no rows in any round.
BUSY, QUIET = Case("", 1, 2, splits_dense_mlp=True), Case("", 1, 2, splits_dense_mlp=True, served=(2,))

Said = list[dict[str, Any]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    mixture = tmp_path_factory.mktemp(MIXTURE)
    return {"llama": new_llama(tmp_path_factory.mktemp("llama")), MIXTURE: test_experts.new_model(MIXTURE, mixture)}


def new_llama(directory: Path) -> Model:
    torch.manual_seed(7)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).eval()
    model.save_pretrained(directory)
    return model, directory


def of_model(case: Case, directory: Path) -> Case:
    return Case(str(directory), case.tp_size, case.ep_size, case.splits_dense_mlp, case.served)


@pytest.fixture(scope="module")
def shared(
    models: dict[str, Model], kernel_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[Case, Said]:
    """What each rank of a case tells, in rank order."""
    directories = [directory for _, directory in models.values()]
    for directory in directories:
        answers_alone(directory, kernel_cache, Shard())  # builds the kernel
    grids = [Case("", tp_size, ep_size, splits_dense_mlp=True) for tp_size, ep_size in GRIDS]
    cases = [of_model(case, directory) for directory in directories for case in (*grids, QUIET)]
    with rank_processes(tmp_path_factory.mktemp("ranks") / "rendezvous", kernel_cache, cases) as processes:
        by_rank = []
        for process in processes:
            out, errors = process.communicate(timeout=2 * LIMIT_S)
            assert process.returncode == 0, errors
            by_rank.append(json.loads(out))
    by_case = zip(*by_rank, strict=True)
    return {case: [rank for rank in ranks if rank is not None] for case, ranks in zip(cases, by_case, strict=True)}


def answers_alone(directory: Path, cache_dir: Path, shard: Shard) -> Answers:
    storage, collectives = storage_of(directory, 1), Grid(shard, None, None)
    runner = load(directory, read_config(directory), storage, collectives=collectives, **options(cache_dir))
    return {answer.request.request_id: told(answer) for answer in Server(runner, storage, CHUNK).serve(requests())}


@pytest.mark.parametrize(("tp_size", "ep_size"), GRIDS)
@pytest.mark.parametrize("name", NAMES)
def test_ranks_that_split_dense_mlps_answer_as_transformers_does(
    models: dict[str, Model], shared: Mapping[Case, Said], name: str, tp_size: int, ep_size: int
) -> None:
    """Three requests of different lengths: ranks have unequal numbers of rows, and none once theirs are answered."""
    model, directory = models[name]
    said = shared[Case(str(directory), tp_size, ep_size, splits_dense_mlp=True)]
    assert len(said) == tp_size * ep_size
    assert max(rank["num_idle"] for rank in said) > 0
    for first in range(0, len(said), tp_size):
        assert all(rank == said[first] for rank in said[first : first + tp_size])
    check_against_transformers(model, joined(said))


@pytest.mark.parametrize("name", NAMES)
def test_a_request_s_bits_do_not_depend_on_what_the_other_ranks_compute(
    models: dict[str, Model], shared: Mapping[Case, Said], name: str
) -> None:
    busy, quiet = (shared[of_model(case, models[name][1])] for case in (BUSY, QUIET))
    assert (quiet[0]["num_idle"], quiet[1]["answers"]) == (0, {})
    assert joined(quiet) == {"2": joined(busy)["2"]}


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_that_splits_with_nobody_answers_as_one_that_does_not(
    models: dict[str, Model], kernel_cache: Path, name: str
) -> None:
    directory = models[name][1]
    split, whole = (answers_alone(directory, kernel_cache, Shard(splits_dense_mlp=splits)) for splits in (True, False))
    assert split == whole


# ---------------------------------------------------------------- what a rank holds


@pytest.mark.parametrize(("tp_size", "ep_size"), GRIDS)
@pytest.mark.parametrize("name", NAMES)
def test_a_rank_reads_its_share_of_the_dense_mlps_and_no_more(
    models: dict[str, Model], monkeypatch: pytest.MonkeyPatch, name: str, tp_size: int, ep_size: int
) -> None:
    read: dict[str, int] = {}
    take = Checkpoint.take

    def watched(checkpoint: Checkpoint, name: str, rows: range | None = None, columns: range | None = None) -> Any:
        tensor = take(checkpoint, name, rows, columns)
        read[name] = read.get(name, 0) + tensor.numel()
        return tensor

    monkeypatch.setattr(Checkpoint, "take", watched)
    directory = models[name][1]
    config = read_config(directory)
    for rank in range(tp_size * ep_size):
        shard = Shard(tp_size, rank % tp_size, ep_size, rank // tp_size, splits_dense_mlp=True)
        before = dict(read)
        load_weights(directory, config, shard=shard)
        for layer in range(config.num_layers):
            if config.experts_of(layer) is None:
                gate = f"model.layers.{layer}.mlp.gate_proj.weight"
                assert (read[gate] - before.get(gate, 0)) * tp_size * ep_size == 80 * 48
    whole = {name: shape[0] * shape[1] for name, shape in expected_shapes(config).items() if _is_dense_mlp(name)}
    assert {name: read[name] for name in whole} == whole


def _is_dense_mlp(name: str) -> bool:
    return any(name.endswith(f"mlp.{matrix}_proj.weight") for matrix in ("gate", "up", "down"))


def test_only_dense_mlps_that_are_split_take_part_in_exchanges(models: dict[str, Model]) -> None:
    directory = models["llama"][1]
    for splits, kind in ((True, SplitMlp), (False, DenseMlp)):
        shard = Shard(ep_size=2, splits_dense_mlp=splits)
        for layer in load_weights(directory, read_config(directory), shard=shard).layers:
            assert isinstance(layer.mlp, kind)
            assert layer.mlp.is_shared is splits

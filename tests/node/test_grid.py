"""Which grids of ranks a model fits, and when their rounds are a matter of each other."""

from __future__ import annotations

from typing import Any

import pytest

from pdserve.config import ServerArgs
from pdserve.errors import StartupError
from pdserve.model.experts_config import MIXTRAL, ExpertsConfig
from pdserve.model.model_config import DefaultRope, ModelConfig
from pdserve.node.grid import check_grid, goes_in_step

MIXTURE = ExpertsConfig(MIXTRAL, 4, 2, 80, True, frozenset({1}))


def config_of(experts: ExpertsConfig | None = None) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM" if experts is None else "MixtralForCausalLM",
        hidden_size=48,
        intermediate_size=80,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=97,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope=DefaultRope(10000.0),
        has_tied_embeddings=True,
        bos_token_id=None,
        eos_token_ids=(),
        experts=experts,
    )


def args_of(**settings: Any) -> ServerArgs:
    return ServerArgs(model="m", **settings)


@pytest.mark.parametrize(
    ("experts", "settings", "is_in_step"),
    [
        (None, {"data_parallel_size": 2}, False),
        (None, {"data_parallel_size": 2, "dense_mlp_split": True}, True),
        (None, {"data_parallel_size": 2, "prefill_attempt_interval": 2, "prefill_any_attempt_interval": 4}, True),
        (None, {"tensor_parallel_size": 2}, False),
        (MIXTURE, {"data_parallel_size": 2}, True),
        (MIXTURE, {}, False),
    ],
)
def test_ranks_that_share_work_or_a_gate_go_in_step(
    experts: ExpertsConfig | None, settings: dict[str, Any], is_in_step: bool
) -> None:
    assert goes_in_step(config_of(experts), args_of(**settings)) is is_in_step


@pytest.mark.parametrize("experts", [None, MIXTURE])
def test_a_dense_mlp_that_has_no_equal_slices_for_all_processes_is_refused(experts: ExpertsConfig | None) -> None:
    fits = {"data_parallel_size": 4, "tensor_parallel_size": 2}
    check_grid(config_of(experts), args_of(dense_mlp_split=True, **fits))
    check_grid(config_of(experts), args_of(data_parallel_size=3))
    with pytest.raises(StartupError, match=r"80 neurons .* all 3 processes .* choose --data-parallel-size 2 or 4 or 5"):
        check_grid(config_of(experts), args_of(data_parallel_size=3, dense_mlp_split=True))

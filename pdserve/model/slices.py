"""Which slices of a model's sizes a rank holds, and over how many ranks a model can be split."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.errors import StartupError
from pdserve.kv.layout import can_split_heads, held_heads
from pdserve.model.model_config import ModelConfig
from pdserve.model.shard import Shard

# Larger numbers of data-parallel ranks may work too, and are not listed.
MOST_NAMED = 64


@dataclass(frozen=True, slots=True)
class Slices:
    """What a rank holds. heads: of the queries; kv_heads: several ranks hold one where there are more ranks than heads.

    vocabulary: tokens. Ranks hold num_vocabulary_rows each, so that what they say of them can be laid side by side: the
    last ranks have fewer tokens than rows, or none, and zeros behind them.
    """

    heads: range
    kv_heads: range
    vocabulary: range
    num_vocabulary_rows: int


def slices_of(config: ModelConfig, shard: Shard) -> Slices:
    """Raises StartupError, naming the sizes that work, where the model cannot be split over the shard's ranks."""
    check_split(config, shard.tp_size)
    if shard.splits_dense_mlp:
        check_dense_split(config, shard.tp_size, shard.ep_size)
    num_rows = -(-config.vocab_size // shard.tp_size)
    first, end = (min(rank * num_rows, config.vocab_size) for rank in (shard.tp_rank, shard.tp_rank + 1))
    return Slices(
        heads=shard.slice_of("attention heads", config.num_heads),
        kv_heads=held_heads(config.num_kv_heads, shard.tp_size, shard.tp_rank),
        vocabulary=range(first, end),
        num_vocabulary_rows=num_rows,
    )


def check_split(config: ModelConfig, tp_size: int) -> None:
    """Raises StartupError, naming the sizes that work, where the model cannot be split over tp_size ranks."""
    if not _can_split(config, tp_size):
        sizes = [str(size) for size in range(1, config.num_heads + 1) if _can_split(config, size)]
        raise StartupError(
            f"--tensor-parallel-size is {tp_size}, the model has {config.num_heads} attention heads, "
            f"{config.num_kv_heads} KV heads and MLPs of {' and '.join(map(str, sorted(config.intermediate_sizes)))}: "
            f"choose {' or '.join(sizes)}"
        )


def check_dense_split(config: ModelConfig, tp_size: int, dp_size: int) -> None:
    """Raises StartupError, naming what works, where dense MLPs cannot be split over dp_size ranks of tp_size each."""
    if not config.has_dense_layers:
        raise StartupError(
            "--dense-mlp-split: every layer of the model is a mixture of experts, which are split over the "
            "data-parallel ranks anyway: leave it out"
        )
    if config.intermediate_size % (tp_size * dp_size):
        sizes = [str(size) for size in range(2, MOST_NAMED + 1) if config.intermediate_size % (tp_size * size) == 0]
        choice = f"choose --data-parallel-size {' or '.join(sizes)}, or leave" if sizes else "leave"
        raise StartupError(
            f"--dense-mlp-split splits the {config.intermediate_size} neurons of a dense MLP evenly over all "
            f"{dp_size * tp_size} processes (--data-parallel-size {dp_size}, --tensor-parallel-size {tp_size}): "
            f"{choice} --dense-mlp-split out"
        )


def _can_split(config: ModelConfig, tp_size: int) -> bool:
    has_equal_parts = all(size % tp_size == 0 for size in (config.num_heads, *config.intermediate_sizes))
    return has_equal_parts and can_split_heads(config.num_kv_heads, tp_size)

"""Whether a model fits the grid of ranks it is asked to run on, and whether those have to go in step."""

from __future__ import annotations

from pdserve.config import ServerArgs
from pdserve.errors import StartupError
from pdserve.model.model_config import ModelConfig
from pdserve.model.shard import Shard
from pdserve.model.slices import check_dense_split, check_split


def check_grid(config: ModelConfig, args: ServerArgs) -> None:
    """Raises StartupError, naming the flag and what it may be, before any process is started."""
    check_split(config, args.tensor_parallel_size)
    if args.dense_mlp_split:
        check_dense_split(config, args.tensor_parallel_size, args.data_parallel_size)
    if config.experts is not None:
        Shard(ep_size=args.data_parallel_size).experts_of(config.experts.num_experts)
    if args.tensor_parallel_size > 1 and args.host_kv_gb:
        raise StartupError(
            f"--host-kv-gb {args.host_kv_gb:g}: the host tier is not split over tensor-parallel ranks yet; leave "
            "it out, or use --data-parallel-size"
        )


def goes_in_step(config: ModelConfig, args: ServerArgs) -> bool:
    """Ranks meet in every round where they share experts, dense MLPs or a gate; others have nothing to agree on."""
    is_shared = config.experts is not None or args.dense_mlp_split or args.prefill_gate is not None
    return args.data_parallel_size > 1 and is_shared

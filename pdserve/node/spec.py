"""What a rank process is told, from the settings of its node."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path

from pdserve.config import ServerArgs, cache_dir
from pdserve.engine.launch import GridSpec, PolicySpec, RankSpec, TierSpec, TransportSpec
from pdserve.model.revision import Revision


def rank_spec(
    args: ServerArgs, model: Revision, sockets: Path, incarnation: str, has_transport: bool, grid: GridSpec
) -> RankSpec:
    """What the rank at its place in the grid is told."""
    transport = TransportSpec(
        name=f"{args.role}-{socket.gethostname()}-{incarnation}-{grid.rank}",
        endpoint=f"ipc://{sockets}/transport{grid.rank}",
        lease_s=args.kv_lease_s,
        quarantine_s=args.quarantine_s,
        has_checksums=args.kv_checksum,
    )
    return RankSpec(
        model_directory=str(model.directory),
        model_revision=model.text,
        cache_directory=str(cache_dir()),
        endpoint=f"ipc://{sockets}/loop{grid.rank}",
        source=f"{args.role}:{args.port}/rank{grid.rank}",
        num_threads=args.compute_threads,
        block_size=args.block_size,
        num_kv_blocks=args.num_kv_blocks,
        kv_memory_fraction=args.kv_memory_fraction,
        max_num_seqs=args.max_num_seqs_a_rank,
        chunked_prefill_size=args.chunked_prefill_size,
        max_model_len=args.max_model_len,
        enable_mixed_batch=args.enable_mixed_batch,
        prefix_caching=args.prefix_caching,
        max_outstanding_transfers=args.max_outstanding_prefills,
        log_level=args.log_level,
        log_format=args.log_format,
        startup_timeout_s=args.startup_timeout_s,
        grid=grid,
        step_endpoints=tuple(f"ipc://{sockets}/steps{rank}" for rank in _stepping(grid)),
        transport=transport if has_transport else None,
        policy=_policy_spec(args),
        tiers=TierSpec(args.host_kv_bytes, args.kv_dir, args.kv_dir_bytes),
    )


def _stepping(grid: GridSpec) -> Iterable[int]:
    """Ranks whose channel for rounds this one has an end of: a follower's own, a leader's followers'."""
    if grid.tp_rank:
        return (grid.rank,)
    return range(grid.rank + 1, grid.rank + grid.tensor_parallel_size)


def _policy_spec(args: ServerArgs) -> PolicySpec:
    gate, fill, cadence = args.prefill_gate, args.fill, args.cadence
    return PolicySpec(
        attempt_interval=gate.attempt_interval if gate else None,
        any_interval=gate.any_interval if gate else None,
        max_open_rounds=args.prefill_max_open_rounds,
        prefill_rounds=cadence.prefill_rounds if cadence else None,
        decode_rounds=cadence.decode_rounds if cadence else 1,
        hold_budget=cadence.hold_budget if cadence else None,
        fill_tokens=fill.tokens if fill else None,
        fill_max_holds=fill.max_holds if fill else 1,
    )

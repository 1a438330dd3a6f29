"""What a rank process is told, from the settings of its node."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from pathlib import Path

from pdserve.assembly.interface import interface_of
from pdserve.config import ServerArgs, cache_dir
from pdserve.config.peer_address import join_address
from pdserve.config.ports import free_port
from pdserve.engine.launch import GridSpec, MeetingSpec, PolicySpec, RankSpec, TierSpec, TransportSpec
from pdserve.model.revision import Revision


def node_of(args: ServerArgs, rank: int) -> int:
    """The machine a rank is on: as many on each, in order."""
    return rank // args.num_local_ranks


def grid_of(args: ServerArgs, sockets: Path, *, is_in_step: bool) -> list[GridSpec]:
    """The places of all ranks."""
    meeting = _meeting(args, sockets)
    return [
        GridSpec(
            data_parallel_size=args.data_parallel_size,
            tensor_parallel_size=args.tensor_parallel_size,
            rank=rank,
            num_local_ranks=args.num_local_ranks,
            meeting=meeting,
            is_in_step=is_in_step,
            splits_dense_mlp=args.dense_mlp_split,
        )
        for rank in range(args.num_ranks)
    ]


def _meeting(args: ServerArgs, sockets: Path) -> MeetingSpec:
    if args.nnodes == 1:
        return MeetingSpec(str(sockets))
    host, _ = args.meeting_point
    return MeetingSpec(str(sockets), f"tcp://{join_address(host, free_port(host))}", interface_of(host))


def rank_spec(
    args: ServerArgs, model: Revision, sockets: Path, incarnation: str, has_transport: bool, grid: GridSpec
) -> RankSpec:
    """What the rank at its place in the grid is told."""
    transport = TransportSpec(
        name=f"{args.role}-{socket.gethostname()}-{incarnation}-{grid.rank}",
        endpoint=_endpoint(args, sockets, f"transport{grid.rank}", grid.rank),
        lease_s=args.kv_lease_s,
        quarantine_s=args.quarantine_s,
        has_checksums=args.kv_checksum,
    )
    return RankSpec(
        model_directory=str(model.directory),
        model_revision=model.text,
        cache_directory=str(cache_dir()),
        endpoint=_endpoint(args, sockets, f"loop{grid.rank}", grid.rank),
        source=f"{args.role}:{args.port}/rank{grid.rank}",
        num_threads=args.compute_threads,
        block_size=args.block_size,
        num_kv_blocks=args.num_kv_blocks,
        kv_memory_fraction=args.kv_memory_fraction,
        max_num_seqs=args.max_num_seqs_a_rank,
        chunked_prefill_size=args.chunked_prefill_size,
        max_model_len=args.max_model_len,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
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


def _endpoint(args: ServerArgs, sockets: Path, name: str, rank: int) -> str:
    """Where the front binds; over tcp to any port, which is known once it has."""
    if node_of(args, rank) == 0:
        return f"ipc://{sockets}/{name}"
    host, _ = args.meeting_point
    return f"tcp://{join_address(host, 0)}"


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

"""A rank process: `python -m pdserve.engine.rank_process`, told what to be on standard input."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pdserve.engine.channel import RankChannel
from pdserve.engine.launch import PolicySpec, RankSpec, TierSpec, TransportSpec, read_spec
from pdserve.engine.memory import available_bytes, choose_num_blocks
from pdserve.engine.messages import FromRank, FromTransport, Loading, Ready, StartFailed, ToRank, ToTransport
from pdserve.engine.rank import RankLoop
from pdserve.engine.storage_thread import StorageThread
from pdserve.engine.tiers import HostTierLink
from pdserve.engine.transport_thread import TransportThread
from pdserve.errors import StartupError
from pdserve.kv.layout import LAYOUT_VERSION, Fingerprint, KVLayout
from pdserve.kv.storage import KVStorage
from pdserve.model.checkpoint import checkpoint_files
from pdserve.model.model_config import ModelConfig, read_config
from pdserve.model.runner import ModelRunner
from pdserve.model.torch_runner import load
from pdserve.model.weights import revision
from pdserve.request import RequestId, SamplingParams, TokenRequest
from pdserve.scheduler.config import GATE_WATERMARK, CadenceLimits, SchedulerConfig
from pdserve.scheduler.gate import PrefillGate
from pdserve.scheduler.plan import StepDone, Submission
from pdserve.scheduler.scheduler import Scheduler
from pdserve.telemetry import configure_logging
from pdserve.transfer.file_tier import FileTier
from pdserve.transfer.nixl import NixlTransport

log = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_WARM_UP_ROUNDS = 3


def main() -> int:
    """Exit status 0 after Stop, 2 when it could not start."""
    _end_with_parent()
    spec = read_spec(sys.stdin.buffer.read())
    configure_logging(spec.log_level, spec.log_format, spec.source)
    front: RankChannel[ToRank, FromRank] = RankChannel(spec.endpoint, ToRank)
    try:
        return _run(spec, front)
    finally:
        front.close()


def _run(spec: RankSpec, front: RankChannel[ToRank, FromRank]) -> int:
    try:
        rank = build(spec, front)
    except StartupError as error:
        front.send(StartFailed(error.message))
        return 2
    except MemoryError:
        front.send(StartFailed("out of memory while loading: lower --num-kv-blocks or --kv-memory-fraction"))
        return 2
    front.send(rank.ready)
    rank.loop.run()
    if rank.tiers is not None:
        rank.tiers.close()
    if rank.transport is not None:
        rank.transport.close()
    return 0


def _end_with_parent() -> None:
    """A node that was killed leaves no rank behind. Signals meant for the node reach us too and are its to handle."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call above
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@dataclass(frozen=True, slots=True)
class BuiltRank:
    loop: RankLoop
    transport: TransportThread | None
    tiers: HostTierLink | None
    ready: Ready


def build(spec: RankSpec, front: RankChannel[ToRank, FromRank]) -> BuiltRank:
    """Everything between a spec and a warm rank. Raises StartupError."""
    directory = Path(spec.model_directory)
    config = read_config(directory)
    layout = config.kv_layout(spec.block_size)
    weights_bytes = sum(path.stat().st_size for path in checkpoint_files(directory))
    scheduler_config = _scheduler_config(spec, config, layout, available_bytes() - weights_bytes)
    storage = KVStorage(layout, scheduler_config.num_blocks)
    fingerprint = _fingerprint(directory, config, layout)
    runner = load(
        directory,
        config,
        storage,
        max_slots=spec.max_num_seqs,
        max_model_len=scheduler_config.max_model_len,
        cache_dir=Path(spec.cache_directory),
        num_threads=spec.num_threads,
        progress=lambda step, done, total: front.send(Loading(step, done, total)),
    )
    longest_chunk_s = warm_up(
        scheduler_config, runner, lambda done: front.send(Loading("warming up", done, _WARM_UP_ROUNDS))
    )
    scheduler = Scheduler(scheduler_config)
    tiers = _tiers(spec.tiers, storage, scheduler_config.num_host_blocks, fingerprint)
    transport = _transport(spec.transport, storage, scheduler) if spec.transport else None
    metadata = transport.start() if transport else b""
    ready = Ready(
        num_blocks=scheduler_config.num_blocks,
        block_bytes=layout.block_bytes,
        max_model_len=scheduler_config.max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        fingerprint=fingerprint,
        transport_metadata=metadata,
        longest_chunk_s=longest_chunk_s,
    )
    loop = RankLoop(scheduler, runner, front, config.eos_token_ids, transport, tiers, _gate(spec.policy))
    return BuiltRank(loop, transport, tiers, ready)


def _scheduler_config(spec: RankSpec, config: ModelConfig, layout: KVLayout, available: int) -> SchedulerConfig:
    longest = config.max_position_embeddings
    wanted = spec.max_model_len or longest
    if wanted > longest:
        raise StartupError(f"--max-model-len {wanted} is beyond the model's {longest} positions: lower it")
    num_host_blocks = _num_host_blocks(spec.tiers.host_bytes, layout, available)
    num_blocks = choose_num_blocks(
        layout,
        wanted=spec.num_kv_blocks,
        fraction=spec.kv_memory_fraction,
        max_model_len=wanted,
        max_num_seqs=spec.max_num_seqs,
        available=available - spec.tiers.host_bytes,
    )
    policy = spec.policy
    return SchedulerConfig(
        num_blocks=num_blocks,
        block_size=spec.block_size,
        max_batch_size=spec.max_num_seqs,
        max_scheduled_tokens=spec.chunked_prefill_size,
        max_model_len=min(wanted, num_blocks * spec.block_size),
        enable_mixed_batch=spec.enable_mixed_batch,
        prefix_caching=spec.prefix_caching,
        max_outstanding_transfers=spec.max_outstanding_transfers,
        prefill_watermark=GATE_WATERMARK if policy.attempt_interval else None,
        cadence=CadenceLimits(policy.prefill_rounds, policy.decode_rounds, policy.hold_budget),
        fill_tokens=policy.fill_tokens,
        fill_max_holds=policy.fill_max_holds,
        num_host_blocks=num_host_blocks,
        has_storage=spec.tiers.directory is not None,
    )


def _num_host_blocks(host_bytes: int, layout: KVLayout, available: int) -> int:
    """Of the host tier; 0 without one. Raises StartupError for one that holds nothing, or more than there is."""
    num_blocks = host_bytes // layout.block_bytes
    if host_bytes and not num_blocks:
        raise StartupError(
            f"--host-kv-gb holds no KV block of {layout.block_bytes / 2**20:.1f} MiB: raise it or leave it out"
        )
    if host_bytes > available:
        raise StartupError(
            f"--host-kv-gb {host_bytes / 1e9:g} is more than the {max(available, 0) / 1e9:.1f} GB of memory that are "
            "available beside the weights: lower it"
        )
    return num_blocks


def _gate(policy: PolicySpec) -> PrefillGate | None:
    if policy.attempt_interval is None or policy.any_interval is None:
        return None
    return PrefillGate(policy.attempt_interval, policy.any_interval, policy.max_open_rounds)


def _tiers(spec: TierSpec, device: KVStorage, num_host_blocks: int, fingerprint: Fingerprint) -> HostTierLink | None:
    """The host slab, and the files below it, if any. Raises StartupError for a directory that cannot be used."""
    if num_host_blocks == 0:
        return None
    host = KVStorage(device.layout, num_host_blocks)
    if spec.directory is None:
        return HostTierLink(device, host)
    directory = Path(spec.directory)

    def open_storage() -> FileTier:
        return FileTier(
            directory,
            fingerprint,
            slab_ptr=host.data_ptr,
            num_blocks=host.num_blocks,
            block_bytes=host.layout.block_bytes,
            max_bytes=spec.directory_bytes,
        )

    storage = StorageThread(open_storage)
    storage.start()
    return HostTierLink(device, host, storage)


def warm_up(config: SchedulerConfig, runner: ModelRunner, on_round: Callable[[int], None]) -> float:
    """Real prefills and a real decode, planned by a scheduler that is thrown away after.

    Returns the seconds that a chunk as long as they get takes, once everything was touched.
    """
    scheduler = Scheduler(replace(config, num_host_blocks=0, has_storage=False))
    shortest, longest = 1, max(1, min(config.max_scheduled_tokens, config.max_model_len - 1))
    elapsed_s, num_rounds = 0.0, 0
    for num_prompt, num_new in ((shortest, min(2, config.max_model_len - 1)), (longest, 1)):
        params = SamplingParams(max_new_tokens=num_new, temperature=0.0)
        request = TokenRequest(RequestId("warm-up"), (0,) * num_prompt, params)
        scheduler.submit(Submission(request.request_id, request.prompt, num_new))
        while scheduler.has_work:
            elapsed_s = _run_round(scheduler, runner, request)
            num_rounds += 1
            on_round(num_rounds)
    return elapsed_s


def _run_round(scheduler: Scheduler, runner: ModelRunner, request: TokenRequest) -> float:
    """Seconds of its forward."""
    plan = scheduler.plan()
    for start in plan.starts:
        runner.start(start, request)
    start_s = time.monotonic()
    tokens = runner.execute(plan).tokens
    elapsed_s = time.monotonic() - start_s
    scheduler.advance([StepDone(plan.round_id, tokens)])
    return elapsed_s


def _fingerprint(directory: Path, config: ModelConfig, layout: KVLayout) -> Fingerprint:
    return Fingerprint(
        layout_version=LAYOUT_VERSION,
        architecture=config.architecture,
        model_revision=revision(directory),
        dtype=layout.dtype,
        block_size=layout.block_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        vocab_size=config.vocab_size,
    )


def _transport(spec: TransportSpec, storage: KVStorage, scheduler: Scheduler) -> TransportThread:
    def open_channel() -> RankChannel[ToTransport, FromTransport]:
        return RankChannel(spec.endpoint, ToTransport)

    layout = storage.layout
    return TransportThread(
        lambda: NixlTransport(spec.name, storage.data_ptr, storage.num_blocks, layout.block_bytes),
        open_channel,
        block_size=layout.block_size,
        lease_s=spec.lease_s,
        quarantine_s=spec.quarantine_s,
        generation=scheduler.generation,
        hashed_slab=storage.slab.numpy() if spec.has_checksums else None,
    )


if __name__ == "__main__":
    sys.exit(main())

"""Everything between what a rank process is told and a loop that may run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from pdserve.config import Quantization
from pdserve.engine.channel import RankChannel
from pdserve.engine.following import FollowerLoop, Generations
from pdserve.engine.group import Group, InStep, Lone
from pdserve.engine.joining import Joined, join
from pdserve.engine.launch import PolicySpec, RankSpec, TierSpec, TransportSpec
from pdserve.engine.leading import Followers, LeadingLink, LeadingRunner
from pdserve.engine.memory import available_bytes, choose_num_blocks
from pdserve.engine.messages import (
    JOINING,
    WARMING_UP,
    AskForWake,
    FromLeader,
    FromRank,
    FromTransport,
    Loading,
    Ready,
    ToLeader,
    ToRank,
    ToTransport,
)
from pdserve.engine.rank import RankLoop
from pdserve.engine.storage_thread import StorageThread
from pdserve.engine.tiers import HostTierLink
from pdserve.engine.transport_thread import TransportThread
from pdserve.errors import StartupError
from pdserve.kv.layout import LAYOUT_VERSION, Fingerprint, KVLayout
from pdserve.kv.storage import KVStorage
from pdserve.model.checkpoint_files import checkpoint_files
from pdserve.model.forward import LoadArgs, load_forward
from pdserve.model.model_config import ModelConfig, read_config
from pdserve.model.runner import Follower, ModelRunner
from pdserve.model.torch_runner import TorchFollower, load
from pdserve.model.weight_form import choose_form, choose_kv_dtype
from pdserve.request import BlockId, RequestId, SamplingParams, TokenRequest
from pdserve.scheduler.config import GATE_WATERMARK, CadenceLimits, SchedulerConfig
from pdserve.scheduler.gate import PrefillGate
from pdserve.scheduler.plan import StepDone, Submission
from pdserve.scheduler.scheduler import Scheduler
from pdserve.transfer.file_tier import FileTier
from pdserve.transfer.nixl import NixlTransport

_WARM_UP_ROUNDS = 3


class Loop(Protocol):
    """What a rank process does once it is built."""

    def run(self) -> None:
        """Until the front says Stop."""


@dataclass(frozen=True, slots=True)
class BuiltRank:
    loop: Loop
    transport: TransportThread | None
    tiers: HostTierLink | None
    ready: Ready

    def close(self) -> None:
        """Once the loop has ended."""
        if self.tiers is not None:
            self.tiers.close()
        if self.transport is not None:
            self.transport.close()


@dataclass(frozen=True, slots=True)
class Plot:
    """What a rank is built on: its model, its memory, its place among the others."""

    spec: RankSpec
    config: ModelConfig
    quantization: Quantization
    joined: Joined
    scheduler_config: SchedulerConfig
    storage: KVStorage
    front: RankChannel[ToRank, FromRank]

    def runner(self) -> ModelRunner:
        """Of the leader, which draws the tokens."""
        return load(self._directory, self.config, self.storage, **self._loading)

    def follower(self) -> Follower:
        """Of the other processes of its rank."""
        return TorchFollower(load_forward(self._directory, self.config, self.storage, **self._loading))

    @property
    def _directory(self) -> Path:
        return Path(self.spec.model_directory)

    @property
    def _loading(self) -> LoadArgs:
        return {
            "max_slots": self.spec.max_num_seqs,
            "max_model_len": self.scheduler_config.max_model_len,
            "cache_dir": Path(self.spec.cache_directory),
            "num_threads": self.spec.num_threads,
            "progress": lambda step, done, total: self.front.send(Loading(step, done, total)),
            "collectives": self.joined.collectives,
            "quantization": self.quantization,
        }

    def ready(self, transport: TransportThread | None, longest_chunk_s: float = 0.0) -> Ready:
        """Starts the transport."""
        return Ready(
            num_blocks=self.scheduler_config.num_blocks,
            block_bytes=self.storage.layout.block_bytes,
            max_model_len=self.scheduler_config.max_model_len,
            vocab_size=self.config.vocab_size,
            eos_token_ids=self.config.eos_token_ids,
            fingerprint=self.fingerprint,
            transport_metadata=transport.start() if transport else b"",
            longest_chunk_s=longest_chunk_s,
        )

    @property
    def fingerprint(self) -> Fingerprint:
        layout = self.config.kv_layout(self.spec.block_size, self.storage.layout.dtype)
        return _fingerprint(self.spec, self.config, self.quantization, layout)


def build(spec: RankSpec, front: RankChannel[ToRank, FromRank]) -> BuiltRank:
    """Everything between a spec and a warm rank. Raises StartupError."""
    directory = Path(spec.model_directory)
    config = read_config(directory)
    quantization = choose_form(spec.quantization, directory, config, Path(spec.cache_directory))
    kv_dtype = choose_kv_dtype(spec.kv_cache_dtype, quantization)
    layout = config.kv_layout(spec.block_size, kv_dtype).shard(spec.grid.tensor_parallel_size)
    # Measured before any rank has loaded anything: joining waits for all of them.
    available = _available_bytes(spec, directory)
    if spec.grid.num_ranks > 1:
        front.send(Loading(JOINING, 0, 0))
    joined = join(spec.grid, timeout_s=spec.startup_timeout_s)
    scheduler_config = _scheduler_config(spec, config, layout, available)
    num_blocks = joined.least(scheduler_config.num_blocks)
    scheduler_config = replace(
        scheduler_config,
        num_blocks=num_blocks,
        max_model_len=min(scheduler_config.max_model_len, num_blocks * spec.block_size),
    )
    plot = Plot(spec, config, quantization, joined, scheduler_config, KVStorage(layout, num_blocks), front)
    return _build_follower(plot) if spec.grid.tp_rank else _build_leader(plot)


def _available_bytes(spec: RankSpec, directory: Path) -> int:
    """This rank's share of the memory beside the weights."""
    weights_bytes = sum(path.stat().st_size for path in checkpoint_files(directory))
    return available_bytes() // spec.grid.num_local_ranks - weights_bytes // spec.grid.tensor_parallel_size


def _build_leader(plot: Plot) -> BuiltRank:
    spec, front, scheduler_config, storage = plot.spec, plot.front, plot.scheduler_config, plot.storage
    followers: Followers = [RankChannel(endpoint, ToLeader, binds=True) for endpoint in spec.step_endpoints]
    runner = plot.runner()
    if followers:
        runner = LeadingRunner(runner, followers)
    longest_chunk_s = warm_up(
        scheduler_config, runner, lambda done: front.send(Loading(WARMING_UP, done, _WARM_UP_ROUNDS))
    )
    scheduler = Scheduler(scheduler_config)
    tiers = _tiers(spec.tiers, storage, scheduler_config.num_host_blocks, plot.fingerprint)
    transport = _transport(spec.transport, storage, scheduler.generation) if spec.transport else None
    ready = plot.ready(transport, longest_chunk_s)
    loop = RankLoop(
        scheduler,
        runner,
        front,
        plot.config.eos_token_ids,
        LeadingLink(transport, followers) if transport is not None and followers else transport,
        tiers,
        _gate(spec.policy),
        _group(plot),
        spec.grid.dp_rank,
        longest_chunk_s,
    )
    return BuiltRank(loop, transport, tiers, ready)


def _group(plot: Plot) -> Group:
    """Ranks that share nothing but a node go round each for itself."""
    if not plot.spec.grid.is_in_step:
        return Lone()
    return InStep(plot.spec.grid.dp_rank, plot.joined.gather, lambda: plot.front.send(AskForWake()))


def _build_follower(plot: Plot) -> BuiltRank:
    spec = plot.spec
    leader: RankChannel[FromLeader, ToLeader] = RankChannel(spec.step_endpoints[0], FromLeader)
    generations = Generations()
    transport = _transport(spec.transport, plot.storage, generations) if spec.transport else None
    ready = plot.ready(transport)
    return BuiltRank(FollowerLoop(plot.follower(), leader, plot.front, transport, generations), transport, None, ready)


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


def _fingerprint(spec: RankSpec, config: ModelConfig, quantization: Quantization, layout: KVLayout) -> Fingerprint:
    """layout: of the whole model."""
    # KV of quantised weights is not that of the others.
    form = "" if quantization == "fp32" else f"+{quantization}"
    return Fingerprint(
        layout_version=LAYOUT_VERSION,
        architecture=config.architecture,
        model_revision=spec.model_revision + form,
        dtype=layout.dtype,
        block_size=layout.block_size,
        num_layers=layout.num_layers,
        num_kv_heads=layout.num_kv_heads,
        head_dim=layout.head_dim,
        vocab_size=config.vocab_size,
        tensor_parallel_size=spec.grid.tensor_parallel_size,
    )


def _transport(spec: TransportSpec, storage: KVStorage, generation: Callable[[BlockId], int]) -> TransportThread:
    def open_channel() -> RankChannel[ToTransport, FromTransport]:
        return RankChannel(spec.endpoint, ToTransport)

    layout = storage.layout
    return TransportThread(
        lambda: NixlTransport(spec.name, storage.data_ptr, storage.num_blocks, layout.block_bytes),
        open_channel,
        block_size=layout.block_size,
        lease_s=spec.lease_s,
        quarantine_s=spec.quarantine_s,
        generation=generation,
        hashed_slab=storage.slab.numpy() if spec.has_checksums else None,
    )

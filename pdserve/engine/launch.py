"""Rank processes: what one is told at birth, and how it is started, watched and ended."""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress
from typing import Protocol

import msgspec
from msgspec.structs import replace

from pdserve.config import KvCacheDtype, QuantizationSetting
from pdserve.config.environment import without_settings
from pdserve.engine.process_look import ProcessLook, look_at
from pdserve.errors import StartupError


class TransportSpec(msgspec.Struct, frozen=True):
    """name: unique among all agents that ever meet, as a restarted one must not be taken for its predecessor.

    has_checksums: blocks are lent with their hashes, and compared once they were read.
    """

    name: str
    endpoint: str
    lease_s: float
    quarantine_s: float
    has_checksums: bool = False


class PolicySpec(msgspec.Struct, frozen=True):
    """Which rounds may prefill; None = no such policy. See scheduler/gate.py, cadence.py and fill.py."""

    attempt_interval: int | None = None
    any_interval: int | None = None
    max_open_rounds: int | None = None
    prefill_rounds: int | None = None
    decode_rounds: int = 1
    hold_budget: int | None = None
    fill_tokens: int | None = None
    fill_max_holds: int = 1


class TierSpec(msgspec.Struct, frozen=True):
    """host_bytes: of the tier below the device, 0 = none. directory: of the storage below that, None = none."""

    host_bytes: int = 0
    directory: str | None = None
    directory_bytes: int = 0


class MeetingSpec(msgspec.Struct, frozen=True):
    """Where ranks find each other. directory: of those on this machine, theirs alone.

    init_method: how torch.distributed brings those on several machines together; None = there are none. interface: by
    which they talk then; None = where the machine's name leads.
    """

    directory: str = ""
    init_method: str | None = None
    interface: str | None = None


class GridSpec(msgspec.Struct, frozen=True):
    """This rank's place among those that serve one model: dp_rank * tensor_parallel_size + tp_rank.

    num_local_ranks: on its machine. is_in_step: all go through their rounds together. splits_dense_mlp: dense MLPs are
    split over all ranks.
    """

    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    rank: int = 0
    num_local_ranks: int = 1
    meeting: MeetingSpec = MeetingSpec()
    is_in_step: bool = False
    splits_dense_mlp: bool = False

    @property
    def num_ranks(self) -> int:
        return self.data_parallel_size * self.tensor_parallel_size

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tensor_parallel_size

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tensor_parallel_size


class RankSpec(msgspec.Struct, frozen=True):
    """Everything a rank process needs to know. source: what its log lines call it.

    model_revision: of the files in model_directory, for its fingerprint.
    step_endpoints: of a leader, where each of its followers hears of rounds; of a follower, its own.
    """

    model_directory: str
    model_revision: str
    cache_directory: str
    endpoint: str
    source: str
    num_threads: int
    block_size: int
    num_kv_blocks: int | None
    kv_memory_fraction: float
    max_num_seqs: int
    chunked_prefill_size: int
    max_model_len: int | None
    quantization: QuantizationSetting
    kv_cache_dtype: KvCacheDtype
    enable_mixed_batch: bool
    prefix_caching: bool
    max_outstanding_transfers: int | None
    log_level: str
    log_format: str
    startup_timeout_s: float
    grid: GridSpec = GridSpec()
    step_endpoints: tuple[str, ...] = ()
    transport: TransportSpec | None = None
    policy: PolicySpec = PolicySpec()
    tiers: TierSpec = TierSpec()

    def bound(self, loop: str, transport: str | None) -> RankSpec:
        """With the endpoints as the front has bound them, which may have been left open."""
        if self.transport is None or transport is None:
            return replace(self, endpoint=loop)
        return replace(self, endpoint=loop, transport=replace(self.transport, endpoint=transport))


class Process(Protocol):
    """A rank's process, on this machine or another one."""

    async def wait(self) -> str:
        """How it ended, in words that go on after its name."""

    async def end(self, timeout_s: float) -> None:
        """Wait for it to leave, then kill it."""

    def look(self) -> ProcessLook | None:
        """How it looks from outside; None where nothing can be seen of it."""


class RankProcess:
    """A child that runs `pdserve.engine.rank_process`. It ends when its parent does, however the parent ended."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, spec: RankSpec) -> RankProcess:
        # Threads wait asleep in the end: where another process has a core, one that spins keeps its partner from
        # finishing. Not before some tenths of a millisecond, though, the time that a front needs a core for: a round
        # has hundreds of parts, and a partner that fell asleep comes late to the next ones, too.
        waiting = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "200000"}
        # gloo listens where the machine's name leads, unless it is told an interface.
        interface = spec.grid.meeting.interface
        reachable = {"GLOO_SOCKET_IFNAME": interface} if interface is not None else {}
        environment = {**waiting, **reachable, **without_settings(), "OMP_NUM_THREADS": str(spec.num_threads)}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pdserve.engine.rank_process",
            stdin=asyncio.subprocess.PIPE,
            env=environment,
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.msgpack.encode(spec))
        process.stdin.close()
        return cls(process)

    async def status(self) -> int:
        """Its exit status once it has ended, negative for a signal."""
        return await self._process.wait()

    async def wait(self) -> str:
        return f"ended with status {await self.status()}"

    def look(self) -> ProcessLook | None:
        return look_at(self._process.pid)

    async def end(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):  # it may have left in this very moment
                self._process.kill()
            await self._process.wait()


def read_spec(raw: bytes) -> RankSpec:
    """The spec a parent wrote to standard input. Raises StartupError for anything else."""
    try:
        return msgspec.msgpack.decode(raw, type=RankSpec)
    except msgspec.DecodeError as error:
        raise StartupError(f"a rank is started by its node, not by hand ({error}): use `pdserve serve`") from None

"""What is simulated: every knob of a deployment under the names of the node's flags, judged by the node's own rules.

    Deployment(costs, num_kv_blocks=512).replace(decode_interleave_every=8).topology()

Each rank has a pool and rounds of the sizes given.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pdserve.config import CadenceSettings, ConfigError, Fault, Role, ServerArgs, flags
from pdserve.config.fields import FIELDS, flag_name
from pdserve.config.policy_rules import POLICY_FIELDS
from pdserve.faults import shown
from pdserve.scheduler.config import GATE_WATERMARK, CadenceLimits, SchedulerConfig
from pdserve.sim.costs import CostModel
from pdserve.sim.topology import Fused, GateSpec, GroupSpec, Split, Topology

FUSED_COUNTS = ("data_parallel_size", "num_nodes")
SPLIT_COUNTS = ("num_prefill_nodes", "num_decode_nodes", "prefill_data_parallel_size", "decode_data_parallel_size")
# What one process simulates in hours and gigabytes at most.
MOST_RANKS, MOST_BLOCKS = 10_000, 20_000_000
COUNTS = (*FUSED_COUNTS, *SPLIT_COUNTS)
SPLIT_SETTINGS = ("remote_prefill_min_tokens", "max_outstanding_prefills")


@dataclass(frozen=True, slots=True)
class Deployment:
    """Fused nodes (num_nodes of data_parallel_size ranks), or a split of prefill and decode nodes where
    num_prefill_nodes is given. All other fields are those of `pdserve.config`, with the same defaults.

    max_num_seqs: of a node, shared evenly by its ranks. num_kv_blocks, chunked_prefill_size, host_kv_gb: of one rank.
    """

    costs: CostModel
    num_kv_blocks: int
    max_model_len: int | None = None
    max_num_seqs: int = FIELDS["max_num_seqs"].default
    chunked_prefill_size: int = FIELDS["chunked_prefill_size"].default
    enable_mixed_batch: bool = False
    prefix_caching: bool = True
    host_kv_gb: float = 0.0
    kv_dir: str | None = None
    prefill_attempt_interval: int | None = None
    prefill_any_attempt_interval: int | None = None
    prefill_max_open_rounds: int | None = None
    prefill_fill_tokens: int | str | None = None
    prefill_fill_max_holds: int | None = None
    decode_interleave_every: int | None = None
    prefill_decode_interval: int | None = None
    prefill_hold_budget: int | None = None
    remote_prefill_min_tokens: int = 0
    max_outstanding_prefills: int | None = None
    data_parallel_size: int = 1
    num_nodes: int = 1
    num_prefill_nodes: int | None = None
    num_decode_nodes: int | None = None
    prefill_data_parallel_size: int = 1
    decode_data_parallel_size: int = 1

    def replace(self, **changes: Any) -> Deployment:
        """The same with other knobs; unchecked until `validate()` or `topology()`."""
        return dataclasses.replace(self, **changes)

    def without_policies(self) -> Deployment:
        """Prefill first: neither gate nor fill nor cadence."""
        return self.replace(**dict.fromkeys(POLICY_FIELDS))

    @property
    def is_split(self) -> bool:
        return self.num_prefill_nodes is not None or self.num_decode_nodes is not None

    @property
    def num_ranks(self) -> int:
        """Of all nodes together: what a deployment is paid by."""
        if self.is_split:
            return (self.num_prefill_nodes or 0) * self.prefill_data_parallel_size + (
                self.num_decode_nodes or 0
            ) * self.decode_data_parallel_size
        return self.num_nodes * self.data_parallel_size

    @property
    def longest_request(self) -> int:
        """Tokens of prompt and answer together that a rank can hold."""
        pool = self.num_kv_blocks * self.costs.block_size
        return pool if self.max_model_len is None else min(pool, self.max_model_len)

    def topology(self) -> Topology:
        """What to simulate. Raises ConfigError, a StartupError, with everything that is wrong."""
        self.validate()
        if not self.is_split:
            return Fused(self._group(Role.FUSED), self.num_nodes)
        assert self.num_prefill_nodes is not None
        assert self.num_decode_nodes is not None
        return Split(
            prefill=self._group(Role.PREFILL),
            decode=self._group(Role.DECODE),
            num_prefill_nodes=self.num_prefill_nodes,
            num_decode_nodes=self.num_decode_nodes,
            min_remote_tokens=self.remote_prefill_min_tokens,
        )

    def validate(self) -> None:
        """Raises ConfigError with everything that is wrong."""
        if faults := self.faults():
            raise ConfigError(faults)

    def faults(self) -> list[Fault]:
        """What a node would refuse, and what only a group of several ranks can get wrong."""
        wrong = [*self._count_faults()]
        sane = self.replace(**{name: 1 for name in COUNTS if not _is_count(getattr(self, name))})
        found = [*wrong, *sane._shape_faults()]
        found += sane._size_faults()
        for role in sane._roles():
            found += [*sane._args(role).faults(), *sane._share_faults(role)]
        return list({str(fault): fault for fault in found}.values())

    def describe(self) -> str:
        """The flags that make it, as one would give them to `pdserve simulate`, and all but the counts to `serve`."""
        return " ".join(self.flags())

    def flags(self) -> list[str]:
        """Every knob that is not at its default, as words."""
        knobs = {name: getattr(self, name) for name in DEFAULTS if name != "costs"}
        return [word for name, value in knobs.items() if value != DEFAULTS[name] for word in _words(name, value)]

    def _roles(self) -> tuple[Role, ...]:
        return (Role.PREFILL, Role.DECODE) if self.is_split else (Role.FUSED,)

    def _num_ranks_of(self, role: Role) -> int:
        return {
            Role.FUSED: self.data_parallel_size,
            Role.PREFILL: self.prefill_data_parallel_size,
            Role.DECODE: self.decode_data_parallel_size,
        }[role]

    def _args(self, role: Role) -> ServerArgs:
        """A node's settings. Policies go where streams are, so that a pair refuses what `pdserve up` does."""
        values = {name: field.default for name, field in FIELDS.items()}
        given: dict[str, Any] = {
            "model": self.costs.name,
            "role": role,
            "block_size": self.costs.block_size,
            "data_parallel_size": self._num_ranks_of(role),
        }
        for name in SETTINGS:
            only = flags.described(FIELDS[name]).only
            is_policy = name in POLICY_FIELDS and role is not Role.PREFILL
            if is_policy or not only or role in only:
                given[name] = getattr(self, name)
        return ServerArgs.model_construct(set(given), **(values | given))  # unchecked, as it is judged with the rest

    def _group(self, role: Role) -> GroupSpec:
        args, num_ranks = self._args(role), self._num_ranks_of(role)
        gate, fill, cadence = args.prefill_gate, args.fill, args.cadence
        scheduler = SchedulerConfig(
            num_blocks=self.num_kv_blocks,
            block_size=self.costs.block_size,
            max_batch_size=self.max_num_seqs // num_ranks,
            max_scheduled_tokens=self.chunked_prefill_size,
            max_model_len=self.longest_request,
            enable_mixed_batch=args.enable_mixed_batch,
            prefix_caching=self.prefix_caching,
            max_outstanding_transfers=args.max_outstanding_prefills,
            prefill_watermark=GATE_WATERMARK if gate else None,
            cadence=_limits(cadence),
            fill_tokens=fill.tokens if fill else None,
            fill_max_holds=fill.max_holds if fill else 1,
            num_host_blocks=args.host_kv_bytes // self.costs.block_bytes,
            has_storage=self.kv_dir is not None,
        )
        if gate is None:
            return GroupSpec(num_ranks, scheduler)
        spec = GateSpec(gate.attempt_interval, gate.any_interval, self.prefill_max_open_rounds)
        return GroupSpec(num_ranks, scheduler, spec)

    def _count_faults(self) -> Iterable[Fault]:
        for name in COUNTS:
            value = getattr(self, name)
            if not _is_count(value):
                yield Fault(flags.spelled(name), shown(value), "must be a whole number of at least 1")

    def _shape_faults(self) -> Iterable[Fault]:
        """Fused nodes or a pair of kinds, not something of both."""
        fused = [name for name in FUSED_COUNTS if getattr(self, name) != 1]
        if self.is_split:
            for name in fused:
                reason = "counts fused nodes, and --num-prefill-nodes asks for others; give one kind"
                yield Fault(flags.spelled(name), getattr(self, name), reason)
            for name, other in zip(SPLIT_COUNTS[:2], reversed(SPLIT_COUNTS[:2]), strict=True):
                if getattr(self, name) is None:
                    yield Fault(flags.spelled(name), None, f"is missing beside {flags.spelled(other)}")
            return
        for name in (*SPLIT_COUNTS[2:], *SPLIT_SETTINGS):
            if getattr(self, name) != DEFAULTS[name]:
                reason = "is about a pair; give --num-prefill-nodes and --num-decode-nodes too"
                yield Fault(flags.spelled(name), getattr(self, name), reason)

    def _size_faults(self) -> Iterable[Fault]:
        """What no simulation would come to an end with."""
        if self.num_ranks > MOST_RANKS:
            yield Fault(
                "the number of ranks", f"{self.num_ranks:,}", f"must be at most {MOST_RANKS:,}; lower the counts"
            )
        elif type(self.num_kv_blocks) is int and self.num_kv_blocks * self.num_ranks > MOST_BLOCKS:
            reason = f"on {self.num_ranks:,} ranks must be at most {MOST_BLOCKS:,} blocks together; lower it"
            yield Fault(flag_name("num_kv_blocks"), f"{self.num_kv_blocks:,}", reason)

    def _share_faults(self, role: Role) -> Iterable[Fault]:
        """What each rank's part comes to."""
        num_ranks = self._num_ranks_of(role)
        if type(self.max_num_seqs) is int and 0 < self.max_num_seqs < num_ranks:
            reason = f"leaves some of the node's {num_ranks} ranks without a request; give at least as many"
            yield Fault(flag_name("max_num_seqs"), self.max_num_seqs, reason)
        if self.host_kv_gb and self.host_kv_gb * 1e9 < self.costs.block_bytes:
            reason = f"holds no KV block of {self.costs.block_bytes} bytes; raise it or leave it out"
            yield Fault(flag_name("host_kv_gb"), self.host_kv_gb, reason)


def _is_count(value: object) -> bool:
    """What a number of nodes or ranks may be; None = not given."""
    return value is None or (type(value) is int and value >= 1)


def _words(name: str, value: object) -> list[str]:
    if isinstance(value, bool):
        return [flags.spelled(name if value else f"no_{name}")]
    return [] if value is None else [flags.spelled(name), shown(value)]


def _limits(cadence: CadenceSettings | None) -> CadenceLimits | None:
    if cadence is None:
        return None
    return CadenceLimits(cadence.prefill_rounds, cadence.decode_rounds, cadence.hold_budget)


DEFAULTS = {field.name: field.default for field in dataclasses.fields(Deployment)}
# The knobs that a node has too.
SETTINGS = tuple(
    field.name for field in dataclasses.fields(Deployment) if field.name in FIELDS and field.name not in COUNTS
)

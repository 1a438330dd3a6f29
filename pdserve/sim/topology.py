"""Which nodes there are: fused, or prefill and decode; each a group of ranks that go through rounds together."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.scheduler.config import SchedulerConfig


@dataclass(frozen=True, slots=True)
class GateSpec:
    """See scheduler/gate.py."""

    attempt_interval: int
    any_interval: int
    max_open_rounds: int | None = None


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """The ranks of one node: an attention-DP group whose rounds begin and end together. gate None = always open."""

    num_ranks: int
    scheduler: SchedulerConfig
    gate: GateSpec | None = None


@dataclass(frozen=True, slots=True)
class Fused:
    """num_nodes independent nodes that each do everything."""

    group: GroupSpec
    num_nodes: int = 1


@dataclass(frozen=True, slots=True)
class Split:
    """Prefill and decode nodes; min_remote_tokens: shorter prompts are prefilled where they decode."""

    prefill: GroupSpec
    decode: GroupSpec
    num_prefill_nodes: int = 1
    num_decode_nodes: int = 1
    min_remote_tokens: int = 0


Topology = Fused | Split

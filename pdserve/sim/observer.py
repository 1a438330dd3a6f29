"""What a simulation tells while it runs. Whoever wants figures, a picture or a trace listens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from pdserve.sim.workload import SimRequest


class SimRound(NamedTuple):
    """One round of one rank. kind: of its node, "fused", "prefill" or "decode"; node, rank: its place.

    started_s, ends_s: of the group's round; busy_s: of this rank's share of it. is_held: a prompt waited and the gate
    was closed. wants_prefill: the published vote. held_blocks: after the plan.
    """

    kind: str
    node: int
    rank: int
    started_s: float
    ends_s: float
    busy_s: float
    num_prefill_rows: int
    num_prefill_tokens: int
    num_decode_rows: int
    is_held: bool
    wants_prefill: bool
    held_blocks: int


class Transferred(NamedTuple):
    """A handoff's KV, all of it on the decode node. exposed_s: from the first token drawn to the KV's commit."""

    number: int
    started_s: float
    ended_s: float
    num_bytes: int
    exposed_s: float


class Observer(Protocol):
    """Times are those of the client: delivery is in them."""

    def on_tokens(self, time_s: float, numbers: Sequence[int]) -> None:
        """Each of these requests has one more token."""

    def on_end(self, request: SimRequest, time_s: float, num_cached_tokens: int) -> None:
        """Its answer is complete: all of num_output_tokens have been told."""

    def on_failed(self, request: SimRequest, time_s: float, reason: str) -> None:
        """It was refused or given up."""

    def on_round(self, record: SimRound) -> None:
        """A rank's round was planned; called for busy rounds and held ones only."""

    def on_transfer(self, record: Transferred) -> None:
        """KV went from one node to another."""

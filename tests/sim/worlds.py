"""Deployments, costs and observers for tests of the simulator."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pdserve.scheduler.config import SchedulerConfig
from pdserve.sim.costs import CostModel, FrontCosts, HandoffCosts, RankCosts, TierCosts
from pdserve.sim.observer import SimRound, Transferred
from pdserve.sim.simulation import Simulation
from pdserve.sim.topology import Topology
from pdserve.sim.totals import Totals
from pdserve.sim.workload import SimRequest

CHUNK_S = 1.0  # of 64 tokens, see RANK
DECODE_S = 0.25  # of a round, however many rows
RANK = RankCosts(
    prefill_fixed_s=0.0,
    prefill_token_s=CHUNK_S / 64,
    prefill_token_context_s=0.0,
    decode_fixed_s=DECODE_S,
    decode_row_s=0.0,
    decode_context_s=0.0,
)
BLOCK_BYTES = 1024
COSTS = CostModel(
    name="test",
    source="numbers that are easy to add",
    block_size=16,
    block_bytes=BLOCK_BYTES,
    fused=RANK,
    prefill=RANK,
    decode=RANK,
    handoff=HandoffCosts(latency_s=1 / 128, read_s=1 / 64, bytes_per_s=BLOCK_BYTES * 8),
    tiers=TierCosts(host_bytes_per_s=BLOCK_BYTES * 64, storage_bytes_per_s=BLOCK_BYTES * 32, storage_latency_s=1 / 32),
    front=FrontCosts(arrival_s=0.0, delivery_s=0.0),
)
CONFIG = SchedulerConfig(
    num_blocks=256, block_size=16, max_batch_size=8, max_scheduled_tokens=64, max_model_len=4096, answer_headroom=64
)


def config(**changes: Any) -> SchedulerConfig:
    return dataclasses.replace(CONFIG, **changes)


def asked(
    number: int, arrival_s: float = 0.0, prompt: int = 16, output: int = 4, hash_ids: tuple[int, ...] = ()
) -> SimRequest:
    """A request; its pieces are of 64 tokens."""
    return SimRequest(number, arrival_s, prompt, output, hash_ids, hash_block_tokens=64)


@dataclass
class Listed:
    """These requests; following: what a client asks after its answer, by the number of that."""

    requests: Sequence[SimRequest]
    following: Callable[[SimRequest, float], SimRequest | None] = lambda request, now_s: None

    def arrivals(self) -> Iterator[SimRequest]:
        return iter(self.requests)

    def after(self, request: SimRequest, now_s: float) -> SimRequest | None:
        return self.following(request, now_s)


@dataclass
class Everything:
    """Keeps all that is told, and that it is told in order."""

    tokens: dict[int, list[float]] = field(default_factory=dict)
    ended: dict[int, float] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    rounds: list[SimRound] = field(default_factory=list)
    transfers: list[Transferred] = field(default_factory=list)
    last_s: float = 0.0

    def on_tokens(self, time_s: float, numbers: Sequence[int]) -> None:
        self._note(time_s)
        for number in numbers:
            assert number not in self.ended, f"request {number} has a token after its end"
            self.tokens.setdefault(number, []).append(time_s)

    def on_end(self, request: SimRequest, time_s: float, num_cached_tokens: int) -> None:
        self._note(time_s)
        assert request.number not in self.ended, f"request {request.number} ended twice"
        self.ended[request.number] = time_s
        self.cached[request.number] = num_cached_tokens

    def on_failed(self, request: SimRequest, time_s: float, reason: str) -> None:
        self._note(time_s)
        self.failed[request.number] = reason

    def on_round(self, record: SimRound) -> None:
        self.rounds.append(record)

    def on_transfer(self, record: Transferred) -> None:
        self.transfers.append(record)

    def _note(self, time_s: float) -> None:
        assert time_s >= self.last_s, f"{time_s} s is told after {self.last_s} s"
        self.last_s = time_s

    def gaps(self, number: int) -> list[float]:
        """Seconds between one token and the next."""
        return [later - earlier for earlier, later in pairwise(self.tokens[number])]

    def kinds(self) -> str:
        """One letter a busy round, in order: P with prefill, D without."""
        return "".join("P" if record.num_prefill_rows else "D" for record in self.rounds if record.busy_s)


def run(
    topology: Topology,
    requests: Sequence[SimRequest],
    costs: CostModel = COSTS,
    seed: int = 0,
    until_s: float | None = None,
) -> tuple[Everything, Totals]:
    """The whole run, to its end or until_s."""
    seen = Everything()
    totals = Simulation(topology, costs, Listed(requests), seen, seed).run(until_s)
    return seen, totals


def check_all_answered(requests: Sequence[SimRequest], seen: Everything, totals: Totals) -> None:
    """Each request ended once, with exactly its tokens, in time; nothing else was told."""
    assert totals.is_complete
    told = Counter({number: len(times) for number, times in seen.tokens.items()})
    assert told == Counter({request.number: request.num_output_tokens for request in requests})
    assert not seen.failed
    assert all(seen.ended[request.number] == seen.tokens[request.number][-1] for request in requests)
    assert all(seen.tokens[request.number][0] > request.arrival_s for request in requests)

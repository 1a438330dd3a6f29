"""A whole deployment under a virtual clock, made of the schedulers, gates and cadences that serve in production.

Deterministic: the same topology, costs, workload and seed give the same run, to the last bit.
"""

from __future__ import annotations

from random import Random

from pdserve.errors import InternalError, StartupError
from pdserve.sim.clients import Clients
from pdserve.sim.clock import Clock
from pdserve.sim.costs import CostModel
from pdserve.sim.decode_side import DecodeSide
from pdserve.sim.fused import FusedFront
from pdserve.sim.nodes import Nodes, World
from pdserve.sim.observer import Observer
from pdserve.sim.prefill_side import PrefillSide
from pdserve.sim.rank import Rank
from pdserve.sim.topology import Fused, Split, Topology
from pdserve.sim.totals import Moved, Totals, totals_of
from pdserve.sim.workload import SimRequest, Workload


class Simulation:
    """Built for one run. Raises StartupError for a topology that no deployment could have."""

    def __init__(
        self, topology: Topology, costs: CostModel, workload: Workload, observer: Observer, seed: int = 0
    ) -> None:
        _check(topology, costs)
        self._clock = Clock()
        self._world = World(self._clock, costs, observer, Random(seed))
        self._clients = Clients(self._clock, workload, observer, costs.front.delivery_s, self._call)
        self._nodes: list[Nodes] = []
        self._decode_side: DecodeSide | None = None
        if isinstance(topology, Fused):
            self._front: FusedFront | DecodeSide = self._build_fused(topology)
        else:
            self._front = self._decode_side = self._build_split(topology)

    def _build_fused(self, topology: Fused) -> FusedFront:
        nodes = Nodes(self._world, "fused", topology.group, topology.num_nodes)
        costs = self._world.costs
        front = FusedFront(nodes.num_ranks, self._clients, self._clock, costs.front.arrival_s, nodes.put)
        nodes.build(costs.fused, front)
        self._nodes = [nodes]
        return front

    def _build_split(self, topology: Split) -> DecodeSide:
        world, costs = self._world, self._world.costs
        prefill = Nodes(world, "prefill", topology.prefill, topology.num_prefill_nodes)
        decode = Nodes(world, "decode", topology.decode, topology.num_decode_nodes)
        peers = PrefillSide(prefill.num_ranks, self._clock, costs.handoff.latency_s, prefill.put)
        side = DecodeSide(
            decode.num_ranks, peers, self._clients, world, min_remote_tokens=topology.min_remote_tokens, put=decode.put
        )
        prefill.build(costs.prefill, peers)
        decode.build(costs.decode, side)
        self._nodes = [prefill, decode]
        return side

    def _call(self, request: SimRequest) -> None:
        self._front.call(request)

    # ------------------------------------------------------------ the run

    def run(self, until_s: float | None = None) -> Totals:
        """Until every request has ended, or the clock reads until_s.

        Raises InternalError where nothing can go on while requests are left, and where a scheduler's books are wrong.
        """
        self._clients.start()
        if self._clock.run(until_s):
            self._check_end()
        groups = [group for nodes in self._nodes for group in nodes.groups]
        num_group_rounds = sum(group.num_rounds for group in groups)
        return totals_of(self._clock.now_s, self._clients, self._ranks, num_group_rounds, self._moved())

    @property
    def _ranks(self) -> list[Rank]:
        return [rank for nodes in self._nodes for rank in nodes.ranks]

    def _moved(self) -> Moved:
        side = self._decode_side
        return Moved(
            num_handoff_bytes=side.num_bytes if side else 0,
            num_tier_bytes=sum(tiers.num_bytes for nodes in self._nodes for tiers in nodes.tiers),
            num_fallbacks=side.num_fallbacks if side else 0,
        )

    def _check_end(self) -> None:
        """Nothing is left to happen: everybody has had an answer, and every block is back."""
        stuck = self._front.answers.oldest()
        if stuck is not None:
            raise InternalError(
                f"request {stuck.request.number} is stuck: at {self._clock.now_s} s nothing can go on, and "
                f"{self._clients.num_live} requests wait, {self._where(stuck.index)}"
            )
        for rank in self._ranks:
            rank.scheduler.check_integrity()
            if not rank.scheduler.is_idle:
                raise InternalError(f"{rank.place} still holds something after the last answer")

    def _where(self, index: int) -> str:
        """Of the rank of that index among those that answer."""
        rank = self._nodes[-1].ranks[index]
        scheduler = rank.scheduler
        return (
            f"it at {rank.place}, which has {scheduler.num_running} running, {scheduler.num_waiting} waiting and "
            f"{scheduler.num_held_blocks} of {scheduler.config.num_blocks} blocks held"
        )


def _check(topology: Topology, costs: CostModel) -> None:
    if isinstance(topology, Split) and (topology.prefill.gate or topology.decode.gate):
        raise StartupError("a gate for prefill or decode nodes: it holds fused requests only; give it to a fused node")
    groups = [topology.group] if isinstance(topology, Fused) else [topology.prefill, topology.decode]
    for group in groups:
        if group.scheduler.block_size != costs.block_size:
            raise StartupError(
                f"block_size is {group.scheduler.block_size} in a scheduler and {costs.block_size} in costs "
                f"{costs.name!r}: give both the same"
            )

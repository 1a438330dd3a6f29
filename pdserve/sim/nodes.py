"""The nodes of one kind, wired: ranks with a front to tell, groups that go through rounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from pdserve.request import BlockHash
from pdserve.scheduler.gate import PrefillGate
from pdserve.scheduler.plan import Event
from pdserve.sim.clock import Clock
from pdserve.sim.costs import CostModel, RankCosts
from pdserve.sim.group import Group
from pdserve.sim.observer import Observer
from pdserve.sim.rank import Front, Message, Place, Rank
from pdserve.sim.tiers import RankTiers
from pdserve.sim.topology import GroupSpec


@dataclass(frozen=True, slots=True)
class World:
    """What all nodes share. files: hashes of the blocks that any of them stored."""

    clock: Clock
    costs: CostModel
    observer: Observer
    random: Random
    files: set[BlockHash] = field(default_factory=set)

    def noise(self) -> float:
        """A factor for one round's duration."""
        deviation = self.costs.noise
        return math.exp(self.random.gauss(0.0, deviation)) if deviation else 1.0


class Nodes:
    """num_nodes groups of one kind; an index counts ranks through all of them. Nobody is there before `build`."""

    def __init__(self, world: World, kind: str, group: GroupSpec, num_nodes: int) -> None:
        self.num_ranks = num_nodes * group.num_ranks
        self.groups: list[Group] = []
        self.tiers: list[RankTiers] = []
        self._world = world
        self._kind = kind
        self._spec = group
        self._num_nodes = num_nodes

    def put(self, index: int, message: Message) -> None:
        """Into the inbox of the rank of that index."""
        node, rank = divmod(index, self._spec.num_ranks)
        self.groups[node].put(rank, message)

    @property
    def ranks(self) -> list[Rank]:
        return [rank for group in self.groups for rank in group.ranks]

    def build(self, costs: RankCosts, front: Front) -> None:
        world, spec = self._world, self._spec.gate
        for node in range(self._num_nodes):
            gate = PrefillGate(spec.attempt_interval, spec.any_interval, spec.max_open_rounds) if spec else None
            ranks = [self._rank(node, rank, gate, front) for rank in range(self._spec.num_ranks)]
            self.groups.append(Group(ranks, gate, costs, world.clock, world.observer, world.noise))

    def _rank(self, node: int, rank: int, gate: PrefillGate | None, front: Front) -> Rank:
        place = Place(self._kind, node, rank, node * self._spec.num_ranks + rank)
        tiers = None
        if self._spec.scheduler.num_host_blocks:
            tell: Callable[[Event], None] = partial(self.put, place.index)
            costs = self._world.costs
            tiers = RankTiers(self._world.clock, costs.tiers, costs.block_bytes, self._world.files, tell)
            self.tiers.append(tiers)
        return Rank(place, self._spec.scheduler, gate, front, tiers)

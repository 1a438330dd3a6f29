"""What each rank did when: the rounds of a simulation, kept for a picture or a page."""

from __future__ import annotations

import enum
import heapq
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pdserve.sim.observer import SimRound, Transferred
from pdserve.sim.topology import Fused, Topology
from pdserve.sim.workload import SimRequest

DEFAULT_MAX_ROUNDS = 100_000


class Activity(enum.Enum):
    """What a rank's round was for. HELD: its decodes, if any, ran while a prompt waited for the gate."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "prefill + decode"
    HELD = "prompt held"


def activity(record: SimRound) -> Activity:
    """The one word for a round. Prefill that ran outweighs a prompt that was held beside it."""
    if record.num_prefill_rows:
        return Activity.BOTH if record.num_decode_rows else Activity.PREFILL
    return Activity.HELD if record.is_held else Activity.DECODE


class RowKey(NamedTuple):
    """A rank, by the kind of its node, the node's number and its own."""

    kind: str
    node: int
    rank: int

    @property
    def label(self) -> str:
        return f"{self.kind} {self.node}.{self.rank}"


class Timeline:
    """Keeps the first `max_rounds` rounds, and as many transfers; counts what it left out.

    topology: whose ranks get a row even if they never ran a round; without it those that ran do.
    """

    def __init__(
        self, max_rounds: int = DEFAULT_MAX_ROUNDS, topology: Topology | None = None, title: str = "simulated rounds"
    ) -> None:
        self.title = title
        self.rounds: list[SimRound] = []
        self.transfers: list[Transferred] = []
        self.num_rounds_left_out = 0
        self.num_transfers_left_out = 0
        self._max_rounds = max_rounds
        self._known = [] if topology is None else list(_ranks(topology))

    def on_tokens(self, time_s: float, numbers: Sequence[int]) -> None:
        """Not in the picture."""

    def on_end(self, request: SimRequest, time_s: float, num_cached_tokens: int) -> None:
        """Not in the picture."""

    def on_failed(self, request: SimRequest, time_s: float, reason: str) -> None:
        """Not in the picture."""

    def on_round(self, record: SimRound) -> None:
        """Kept while there is room."""
        if len(self.rounds) < self._max_rounds:
            self.rounds.append(record)
        else:
            self.num_rounds_left_out += 1

    def on_transfer(self, record: Transferred) -> None:
        """Kept while there is room, and the rounds beside it are."""
        if len(self.transfers) < self._max_rounds and not self.num_rounds_left_out:
            self.transfers.append(record)
        else:
            self.num_transfers_left_out += 1

    @property
    def end_s(self) -> float:
        """When the last thing that was kept ended."""
        return max([*(r.ends_s for r in self.rounds), *(t.ended_s for t in self.transfers)], default=0.0)

    @property
    def note(self) -> str:
        """What is missing, in a sentence; empty where nothing is."""
        parts = []
        if self.num_rounds_left_out:
            parts.append(f"{self.num_rounds_left_out:,} later rounds")
        if self.num_transfers_left_out:
            parts.append(f"{self.num_transfers_left_out:,} later transfers")
        return f"The first {self._max_rounds:,} rounds; {' and '.join(parts)} are left out." if parts else ""

    def rows(self) -> dict[RowKey, list[SimRound]]:
        """Rounds by rank, prefill nodes first, in order of time."""
        found: dict[RowKey, list[SimRound]] = {key: [] for key in self._known}
        for record in self.rounds:
            found.setdefault(RowKey(record.kind, record.node, record.rank), []).append(record)
        return {key: found[key] for key in sorted(found, key=_place)}

    def lanes(self) -> list[list[Transferred]]:
        """Transfers on as few lines as let no two of a line overlap, each line in order of time."""
        lanes: list[list[Transferred]] = []
        ends: list[tuple[float, int]] = []  # when each line is free again
        for transfer in sorted(self.transfers, key=lambda one: one.started_s):
            if ends and ends[0][0] <= transfer.started_s:
                lane = heapq.heappop(ends)[1]
            else:
                lane = len(lanes)
                lanes.append([])
            lanes[lane].append(transfer)
            heapq.heappush(ends, (transfer.ended_s, lane))
        return lanes

    def write_png(self, path: str | Path) -> None:
        """A picture of all that was kept. Raises StartupError without matplotlib, or where it can't be written."""
        from pdserve.sim.drawing import timeline_png

        timeline_png.write(self, path)

    def write_html(self, path: str | Path) -> None:
        """A page to zoom and pan in, alone in its file. Raises StartupError where it can't be written."""
        from pdserve.sim.drawing import timeline_html

        timeline_html.write(self, path)


_KIND_ORDER = {"prefill": 0, "decode": 1, "fused": 2}


def _place(key: RowKey) -> tuple[int, int, int]:
    return _KIND_ORDER.get(key.kind, len(_KIND_ORDER)), key.node, key.rank


def _ranks(topology: Topology) -> Iterator[RowKey]:
    if isinstance(topology, Fused):
        sides = [("fused", topology.num_nodes, topology.group)]
    else:
        sides = [
            ("prefill", topology.num_prefill_nodes, topology.prefill),
            ("decode", topology.num_decode_nodes, topology.decode),
        ]
    for kind, num_nodes, group in sides:
        yield from (RowKey(kind, node, rank) for node in range(num_nodes) for rank in range(group.num_ranks))

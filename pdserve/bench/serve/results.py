"""What came of a run: every repetition of every load on every server."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdserve.bench.listening import Heard
from pdserve.bench.serve.clients import Driven
from pdserve.bench.serve.figures import Figures, answers
from pdserve.sim.report import Failures


@dataclass(frozen=True, slots=True)
class Run:
    """One repetition of one load on one server."""

    driven: Driven
    figures: Figures


@dataclass(slots=True)
class Measured:
    """One load on one server. A server that did not serve has no runs."""

    runs: list[Run] = field(default_factory=list)

    @property
    def medians(self) -> Figures:
        """Of each figure over the repetitions that have it."""
        return {name: statistics.median(self.values(name)) for name in self._names()}

    def values(self, name: str) -> list[float]:
        return [run.figures[name] for run in self.runs if name in run.figures]

    def heard(self) -> list[Heard]:
        """Of all repetitions; the long prompts are left out."""
        return [answer for run in self.runs for answer in answers(run.driven.asked)]

    def failures(self) -> Failures:
        """Why requests failed, the long prompts among them."""
        found = Failures()
        for driven in (run.driven for run in self.runs):
            long_prompt = [] if driven.long_prompt is None else [driven.long_prompt]
            for one in [*driven.asked, *long_prompt]:
                if one.heard is None:
                    found.add(one.reason)
        return found

    def _names(self) -> list[str]:
        return list(dict.fromkeys(name for run in self.runs for name in run.figures))


@dataclass(frozen=True, slots=True)
class Results:
    """measured: by the load's and the server's name. broken: why a server did not serve to the end, by its name."""

    loads: Sequence[str]
    servers: Sequence[str]
    measured: Mapping[str, Mapping[str, Measured]]
    broken: dict[str, str] = field(default_factory=dict)

    @classmethod
    def empty(cls, loads: Sequence[str], servers: Sequence[str]) -> Results:
        return cls(loads, servers, {load: {server: Measured() for server in servers} for load in loads})

    @property
    def is_whole(self) -> bool:
        """Every server served to the end, and answered something under each load."""
        of_all = [one for by_server in self.measured.values() for one in by_server.values()]
        return not self.broken and all(one.heard() for one in of_all)

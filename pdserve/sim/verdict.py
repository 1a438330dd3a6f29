"""Whether one deployment is really better than another: both on the same samples, none of which chose them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.sim.goals import Figure, Goal, Measures

# Of its own standard error, which a difference has to exceed to be more than chance.
NUM_ERRORS = 2.0


@dataclass(frozen=True, slots=True)
class Difference:
    """Of a figure: pick - default, on the same sample, over all of them. error: the standard error of the mean."""

    mean: float
    error: float

    @property
    def is_distinguishable(self) -> bool:
        return abs(self.mean) > NUM_ERRORS * self.error


@dataclass(frozen=True, slots=True)
class Verdict:
    """num_wins: samples on which the pick is better by the goal. num_met: those on which it keeps the goal's promise.
    figure: the one that decides."""

    num_samples: int
    num_wins: int
    num_met: int
    figure: Figure
    difference: Difference

    @property
    def is_better(self) -> bool:
        """Better on every sample, or on average by more than chance would make it."""
        towards = -1 if self.figure.is_better_low else 1
        gains = self.difference.mean * towards > 0 and self.difference.is_distinguishable
        return self.num_wins == self.num_samples or (gains and self.num_wins > self.num_samples / 2)


def difference(figure: Figure, pick: Sequence[Measures], default: Sequence[Measures]) -> Difference:
    """pick and default: runs on the same samples, in the same order, at least two."""
    each = [figure.of(one) - figure.of(other) for one, other in zip(pick, default, strict=True)]
    return Difference(statistics.fmean(each), statistics.stdev(each) / math.sqrt(len(each)))


def judge(goal: Goal, pick: Sequence[Measures], default: Sequence[Measures]) -> Verdict:
    """The pick against the default, sample by sample."""
    figure = goal.deciding(default)
    return Verdict(
        num_samples=len(pick),
        num_wins=sum(goal.loss([one]) < goal.loss([other]) for one, other in zip(pick, default, strict=True)),
        num_met=sum(map(goal.is_met, pick)),
        figure=figure,
        difference=difference(figure, pick, default),
    )

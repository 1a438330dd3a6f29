"""Looks for the flags that serve a goal best, and says how sure it is.

    field      every policy at some chunk sizes, on one sample of the traffic; the best third on two; of those, on all
    descent    from the best: each neighbour that differs in one knob, until none is better or the budget is spent
    verdict    the pick beside the default on samples that none of this has seen; where it isn't better, the default

Everything is drawn from the seed, so that the same question has the same answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.errors import StartupError
from pdserve.sim import candidates
from pdserve.sim.deployment import Deployment
from pdserve.sim.goals import Goal, Loss, Measures, RanksGoal
from pdserve.sim.traffic import Sample, Traffic
from pdserve.sim.trials import OnProgress, Trials, silent
from pdserve.sim.verdict import Verdict, judge

NUM_SEARCHED, NUM_HELD_OUT = 4, 6
# Seeds of one tuning are far from those of the next.
SEED_STRIDE = 1_000
KEPT_SHARE = 3
NUM_FINALISTS = 4
# Below so much of the share that is asked for, a number of ranks isn't worth a longer look.
HOPELESS = 0.7


@dataclass(frozen=True, slots=True)
class Entry:
    """A deployment with its measures on the held-out samples."""

    deployment: Deployment
    runs: tuple[Measures, ...]


@dataclass(frozen=True, slots=True)
class Tuned:
    """runners_up: next best of the search. verdict: of the pick; None where the search found nothing but the default.
    num_run: simulations in all."""

    goal: Goal
    default: Entry
    pick: Entry
    runners_up: tuple[Entry, ...]
    verdict: Verdict | None
    num_run: int

    @property
    def recommended(self) -> Entry:
        return self.pick if self.verdict is not None and self.verdict.is_better else self.default


@dataclass(frozen=True, slots=True)
class Question:
    """What to tune. try_shapes: other group sizes and ratios of prefill to decode nodes too. most_ranks: as many as
    RanksGoal may ask for; None = as many as the default has."""

    default: Deployment
    goal: Goal
    traffic: Traffic
    budget: int
    try_shapes: bool = False
    most_ranks: int | None = None
    seed: int = 0


def tune(question: Question, on_progress: OnProgress = silent) -> Tuned:
    """Search, then judge. Raises StartupError for a budget that allows nothing."""
    if question.budget < 1:
        raise StartupError(f"--budget {question.budget} must be at least 1 simulation")
    trials = Trials(question.traffic, question.goal.slo, question.budget, on_progress)
    ranked = _Search(question, trials).ranked()
    trials.stage = "checking on fresh samples"
    held_out = _samples(question, NUM_HELD_OUT, is_held_out=True)
    entries = [Entry(one, tuple(trials.runs(one, held_out))) for one in [question.default, *ranked]]
    default, pick, *others = entries
    if pick.deployment == default.deployment:
        pick = default
    verdict = None if pick is default else judge(question.goal, pick.runs, default.runs)
    rest = tuple(entry for entry in others if entry.deployment != default.deployment)
    return Tuned(question.goal, default, pick, rest, verdict, trials.num_run)


def _samples(question: Question, number: int, is_held_out: bool = False) -> list[Sample]:
    return [Sample(question.seed * SEED_STRIDE + n, is_held_out) for n in range(number)]


class _Search:
    """From many to few."""

    def __init__(self, question: Question, trials: Trials) -> None:
        self._default = question.default
        self._goal = question.goal
        self._question = question
        self._trials = trials
        self._samples = _samples(question, NUM_SEARCHED)

    def ranked(self) -> list[Deployment]:
        """The pick and the next best, by all samples of the search."""
        self._trials.stage = "a first look"
        best = self._halved(self._field())
        self._trials.stage = "closer"
        return self._descended(best)[:NUM_FINALISTS]

    # ------------------------------------------------------------ the field

    def _field(self) -> list[Deployment]:
        if isinstance(self._goal, RanksGoal):
            return [self._default, *self._fewest(self._goal)]
        if not self._question.try_shapes:
            return self._affordable(candidates.coarse(self._default))
        return [self._default, *self._of_shapes(candidates.shapes(self._default, self._default.num_ranks))]

    def _affordable(self, field: Sequence[Deployment]) -> list[Deployment]:
        """Evenly many of them, for a first look not to take more than half of the budget; the default among them."""
        step = -(-2 * len(field) // self._question.budget)
        return list(field[::step])

    def _of_shapes(self, shapes: Sequence[Deployment]) -> list[Deployment]:
        """All policies on the best two shapes."""
        best = self._best(shapes, self._samples[:1])[:2]
        return [one for shape in best for one in candidates.coarse(shape, self._default)]

    def _fewest(self, goal: RanksGoal) -> list[Deployment]:
        """Candidates of the least number of ranks at which one keeps the SLO on the first sample; as many as there may
        be where none does."""
        found: list[Deployment] = []
        for num_ranks in range(1, (self._question.most_ranks or self._default.num_ranks) + 1):
            shapes = self._shapes(num_ranks)
            if not shapes:
                continue
            found = self._best(shapes, self._samples[:1])
            if self._met_share(found[0]) < goal.share * HOPELESS and not self._trials.is_spent:
                continue
            found = self._best([*found, *self._of_shapes(found)], self._samples[:1])
            if self._met_share(found[0]) >= goal.share or self._trials.is_spent:
                break
        return found

    def _shapes(self, num_ranks: int) -> list[Deployment]:
        if self._question.try_shapes:
            return candidates.shapes(self._default, num_ranks)
        return candidates.scaled(self._default, num_ranks)

    def _met_share(self, deployment: Deployment) -> float:
        return self._trials.runs(deployment, self._samples[:1])[0].met_share

    # ------------------------------------------------------------ from many to few

    def _halved(self, field: Sequence[Deployment]) -> list[Deployment]:
        """Fewer candidates on more samples; the default stays to the end."""
        num_samples = 1
        while num_samples < len(self._samples):
            best = self._best(field, self._samples[:num_samples])
            field = best[: max(NUM_FINALISTS, len(best) // KEPT_SHARE)]
            num_samples *= 2
        return self._best([*field, self._default], self._samples)

    def _descended(self, ranked: list[Deployment]) -> list[Deployment]:
        """One knob at a time, as long as that is better on all samples."""
        while not self._trials.is_spent:
            start = ranked[0]
            near = self._best(candidates.neighbours(start, self._default), self._samples[:1])[:NUM_FINALISTS]
            ranked = self._best([*ranked, *near], self._samples)
            if ranked[0] == start:
                break
        return ranked

    def _best(self, field: Sequence[Deployment], samples: Sequence[Sample]) -> list[Deployment]:
        """Best first; of equals the one that was there before. What the budget doesn't reach any more is left out."""
        losses: dict[Deployment, Loss] = {}
        for one in field:
            if not losses or not self._trials.is_spent or self._trials.knows(one, samples):
                losses[one] = self._goal.loss(self._trials.runs(one, samples))
        return sorted(losses, key=losses.__getitem__)

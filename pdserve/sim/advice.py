"""What a tuning came to, in figures and in sentences: what to run, why, what it gives up, how sure that is."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pdserve.sim.deployment import Deployment
from pdserve.sim.goals import Figure, Goal, Measures
from pdserve.sim.tune import Entry, Tuned
from pdserve.sim.verdict import Difference, Verdict, difference

# What a change of policy may cost beside what was asked for.
FIGURES = (
    Figure("itl_p99_s", True),
    Figure("worst_gap_s", True),
    Figure("ttft_p50_s", True),
    Figure("ttft_p99_s", True),
    Figure("output_tokens_per_s", False),
    Figure("goodput_per_s", False),
)
WORDS = {
    "itl_p99_s": ("p99 ITL", "ms"),
    "worst_gap_s": ("worst gap", "ms"),
    "ttft_p50_s": ("p50 TTFT", "ms"),
    "ttft_p99_s": ("p99 TTFT", "ms"),
    "output_tokens_per_s": ("output", "tokens/s"),
    "goodput_per_s": ("goodput", "requests/s"),
    "met_share": ("within SLO", "%"),
    "num_ranks": ("ranks", ""),
}
SCALES = {"ms": 1e3, "%": 100.0}


@dataclass(frozen=True, slots=True)
class Capacity:
    """Requests a second at most."""

    default_per_s: float
    pick_per_s: float


# A worst gap so many times the p99 of all gaps is a freeze and no tail.
FREEZE = 10.0


def means(entry: Entry) -> dict[str, float]:
    """Each figure, averaged over the samples."""
    names = [field.name for field in dataclasses.fields(Measures)]
    return {name: statistics.fmean(getattr(run, name) for run in entry.runs) for name in names}


def changes(deployment: Deployment, default: Deployment) -> str:
    """The flags in which it differs; a flag of the default that is gone is named."""
    own, old = deployment.flags(), default.flags()
    gone = {word for word in old if word.startswith("--")} - set(own)
    return " ".join([*_new(own, old), *(f"(no {flag})" for flag in sorted(gone))]) or "as given"


def _new(own: list[str], old: list[str]) -> Iterator[str]:
    known = set(_pairs(old))
    for flag, value in _pairs(own):
        if (flag, value) not in known:
            yield f"{flag} {value}".strip()


def _pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    for number, word in enumerate(words):
        if word.startswith("--"):
            following = words[number + 1] if number + 1 < len(words) else "--"
            yield word, "" if following.startswith("--") else following


def differences(tuned: Tuned) -> dict[Figure, Difference]:
    """The pick's figures less the default's."""
    return {figure: difference(figure, tuned.pick.runs, tuned.default.runs) for figure in FIGURES}


def sentences(tuned: Tuned, capacity: Capacity) -> Iterator[str]:
    """Everything that a person who is to set these flags should know."""
    verdict = tuned.verdict
    if verdict is None:
        yield "Keep the flags as they are: the search found nothing better."
    elif verdict.is_better:
        yield f"Run it with: {tuned.pick.deployment.describe()}"
    else:
        yield "Keep the flags as they are: what the search liked best is not better on samples it had not seen."
    if verdict is not None:
        yield _sureness(verdict)
    if verdict is not None and verdict.is_better:
        yield from _costs(tuned, capacity)
    yield from _promise(tuned.goal, tuned.recommended)
    yield from _freezes(tuned.recommended)


def _freezes(recommended: Entry) -> Iterator[str]:
    """A percentile of gaps is blind to the few that a stream's reader remembers."""
    found = means(recommended)
    if found["worst_gap_s"] > FREEZE * found["itl_p99_s"]:
        yield (
            f"Mind its worst gap of {found['worst_gap_s']:,.1f} s: such gaps are fewer than 1 % of all, so that p99 "
            "ITL does not see them; --goal goodput with --slo-itl-ms judges each stream by its own."
        )


def _sureness(verdict: Verdict) -> str:
    text = f"Better than as given on {verdict.num_wins} of {verdict.num_samples} fresh samples; {_told(verdict)}"
    if not verdict.difference.is_distinguishable:
        text += ", which is not distinguishable from chance"
    return f"{text}."


def _told(verdict: Verdict) -> str:
    return f"{WORDS[verdict.figure.field][0]} {told_difference(verdict.figure, verdict.difference)}"


def told_difference(figure: Figure, found: Difference) -> str:
    """With its standard error, to the error's second digit, and its unit."""
    unit = WORDS[figure.field][1]
    mean, error = (value * SCALES.get(unit, 1.0) for value in (found.mean, found.error))
    digits = max(0, 1 - math.floor(math.log10(error))) if error else 3
    return f"{mean:+,.{digits}f} ± {error:,.{digits}f} {unit}".strip()


def _costs(tuned: Tuned, capacity: Capacity) -> Iterator[str]:
    worse = [
        f"{WORDS[figure.field][0]} {told_difference(figure, found)}"
        for figure, found in differences(tuned).items()
        if found.is_distinguishable and (found.mean > 0) == figure.is_better_low
    ]
    yield f"It gives up: {'; '.join(worse) or 'nothing that can be told from chance'}."
    share = capacity.pick_per_s / capacity.default_per_s - 1 if capacity.default_per_s else 0.0
    yield (
        f"When more always waits it finishes {capacity.pick_per_s:.3g} requests a second, as given "
        f"{capacity.default_per_s:.3g} ({share:+.1%})."
    )


def _promise(goal: Goal, entry: Entry) -> Iterator[str]:
    missed = sum(not goal.is_met(run) for run in entry.runs)
    if missed:
        yield f"Beware: on {missed} of {len(entry.runs)} fresh samples it does not reach the goal, {goal.text}."


def figures(tuned: Tuned, capacity: Capacity) -> dict[str, Any]:
    """The same for programs; all means are over the held-out samples."""
    verdict = tuned.verdict
    entries = {"recommended": tuned.recommended, "default": tuned.default, "pick": tuned.pick}
    return {
        "goal": tuned.goal.text,
        "num_simulations": tuned.num_run,
        **{name: _entry(entry, tuned.default) for name, entry in entries.items()},
        "runners_up": [_entry(entry, tuned.default) for entry in tuned.runners_up],
        "differences": {
            figure.field: {"mean": found.mean, "standard_error": found.error}
            for figure, found in differences(tuned).items()
        },
        "capacity": dataclasses.asdict(capacity),
        "verdict": None if verdict is None else _verdict(verdict),
        "text": list(sentences(tuned, capacity)),
    }


def _entry(entry: Entry, default: Entry) -> dict[str, Any]:
    return {
        "flags": entry.deployment.describe(),
        "changes": changes(entry.deployment, default.deployment),
        **means(entry),
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "is_better": verdict.is_better,
        "is_distinguishable": verdict.difference.is_distinguishable,
        "num_samples": verdict.num_samples,
        "num_wins": verdict.num_wins,
        "num_met": verdict.num_met,
        "figure": verdict.figure.field,
        "difference": verdict.difference.mean,
        "standard_error": verdict.difference.error,
    }

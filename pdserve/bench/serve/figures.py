"""What clients saw, in the figures that one server is compared with another by.

TTFT            from a request's call to its first token
ITL             a gap between two tokens; all gaps of all answers
TPOT            (last token - first token) / (tokens - 1) of each answer
e2e             from a request's call to its last token
goodput         requests that met the SLO: TTFT within its limit, and the mean of their gaps within that of ITL
strict goodput  the same with every gap within it, as a reader feels a freeze that a mean hides
a second        while the load was full (Driven.full_s): what ended by then

Requests that failed met nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdserve.bench.fidelity.figures import percentile
from pdserve.bench.listening import Heard
from pdserve.bench.serve.clients import Asked, Driven

SHARES = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits in seconds."""

    ttft_s: float = 2.0
    itl_s: float = 0.150

    def is_met(self, heard: Heard) -> bool:
        return heard.ttft_s <= self.ttft_s and tpot_s(heard) <= self.itl_s

    def is_met_strictly(self, heard: Heard) -> bool:
        return heard.ttft_s <= self.ttft_s and max(heard.gaps_s, default=0.0) <= self.itl_s


def tpot_s(heard: Heard) -> float:
    """0 for an answer of one token."""
    return (heard.arrivals_s[-1] - heard.arrivals_s[0]) / max(1, len(heard.arrivals_s) - 1)


def answers(asked: Iterable[Asked]) -> list[Heard]:
    """Of those that did not fail."""
    return [one.heard for one in asked if one.heard is not None]


def figures(driven: Driven, slo: Slo) -> Figures:
    """Under stable names with units; what nothing was heard for is left out."""
    heard = answers(driven.asked)
    found: Figures = {
        "num_requests": len(driven.asked),
        "num_failed": len(driven.asked) - len(heard),
        "num_refused": sum(one.is_refused for one in driven.asked),
        "elapsed_s": driven.full_s,
        **_goodputs(driven, heard, slo),
        **_speeds(driven, heard),
        **_percentiles("ttft", [answer.ttft_s for answer in heard]),
        **_percentiles("itl", [gap_s for answer in heard for gap_s in answer.gaps_s]),
        **_percentiles("tpot", [tpot_s(answer) for answer in heard if len(answer.arrivals_s) > 1]),
        **_percentiles("e2e", [answer.wall_s for answer in heard]),
    }
    if gaps_s := [gap_s for answer in heard for gap_s in answer.gaps_s]:
        found["worst_gap_s"] = max(gaps_s)
    if driven.long_prompt is not None and driven.long_prompt.heard is not None:
        found |= _beside(driven.long_prompt.heard, heard)
    return found


def _goodputs(driven: Driven, heard: Sequence[Heard], slo: Slo) -> Figures:
    found: Figures = {}
    for name, good in (
        ("goodput", [answer for answer in heard if slo.is_met(answer)]),
        ("strict_goodput", [answer for answer in heard if slo.is_met_strictly(answer)]),
    ):
        found[name] = len(good) / max(1, len(driven.asked))
        found[f"{name}_per_s"] = sum(_is_full(driven, answer.arrivals_s[-1]) for answer in good) / driven.full_s
    return found


def _speeds(driven: Driven, heard: Sequence[Heard]) -> Figures:
    """A prompt counts when its first token comes, with what was cached of it."""
    num_prompt_tokens = sum(
        len(one.call.prompt)
        for one in driven.asked
        if one.heard is not None and _is_full(driven, one.heard.arrivals_s[0])
    )
    num_output_tokens = sum(_is_full(driven, at_s) for answer in heard for at_s in answer.arrivals_s)
    return {
        "prompt_tokens_per_s": num_prompt_tokens / driven.full_s,
        "output_tokens_per_s": num_output_tokens / driven.full_s,
        "num_cached_tokens": sum(answer.num_cached_tokens for answer in heard),
    }


def _is_full(driven: Driven, at_s: float) -> bool:
    return at_s <= driven.began_s + driven.full_s


def _percentiles(kind: str, times_s: Sequence[float]) -> Figures:
    ordered = sorted(times_s)
    return {f"{kind}_{label}_s": percentile(ordered, share) for label, share in SHARES.items() if ordered}


def _beside(long_prompt: Heard, heard: Sequence[Heard]) -> Figures:
    """What the long prompt did to the others from its call to its first token. A gap counts if some of it lies there.

    beside_worst_wait_s: the longest time to a first token of those that called meanwhile; left out where nobody did.
    """
    found: Figures = {"long_ttft_s": long_prompt.ttft_s}
    begin_s, end_s = long_prompt.called_s, long_prompt.arrivals_s[0]
    gaps_s = [
        gap_s
        for answer in heard
        for gap_s, at_s in zip(answer.gaps_s, answer.arrivals_s[1:], strict=True)
        if at_s >= begin_s and at_s - gap_s <= end_s
    ]
    waits_s = [answer.ttft_s for answer in heard if begin_s <= answer.called_s <= end_s]
    if gaps_s:
        found["beside_worst_gap_s"] = max(gaps_s)
    if waits_s:
        found["beside_worst_wait_s"] = max(waits_s)
    return found

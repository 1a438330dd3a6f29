"""How well a form of the weights foresees a text: a page of English prose, always the same (prose.txt)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from pdserve.request import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Quality:
    """nll: mean -log(probability) of the text's tokens, each after those before it, in nats.

    Where fp32 was measured too: over_fp32, by how much the perplexity is greater, as a share of fp32's; agreement, the
    share of positions in which the most likely token is fp32's.
    """

    nll: float
    perplexity: float
    over_fp32: float | None
    agreement: float | None


def prose() -> str:
    return (resources.files("pdserve.bench.speed") / "prose.txt").read_text(encoding="utf-8")


def judge(entries: Sequence[TokenLogprobs], exact: Sequence[TokenLogprobs] | None) -> Quality:
    """entries: of the text's tokens from the second on, with the most likely one of each; exact: fp32's."""
    nll = _nll(entries)
    if exact is None:
        return Quality(nll, math.exp(nll), None, None)
    same = sum(ours.top[0][0] == theirs.top[0][0] for ours, theirs in zip(entries, exact, strict=True))
    return Quality(nll, math.exp(nll), math.expm1(nll - _nll(exact)), same / len(entries))


def _nll(entries: Sequence[TokenLogprobs]) -> float:
    return -sum(entry.logprob for entry in entries) / len(entries)

"""Kinds of traffic by name, in lengths that fit a deployment and at a rate that loads it.

    chat      short prompts, answers of a few hundred tokens, callers who know nothing of each other
    coding    contexts of 8k to 100k tokens (of a model of 131,072; scaled to a shorter one), and short questions beside
    burst     chat's lengths, arriving in bursts

The lengths are assumptions in round numbers, of the shape that published traces have: lognormal, a few far longer than
the most. Where there is a trace of one's own it says more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.errors import StartupError
from pdserve.sim.arrivals import MixedShapes, OpenLoop, Shape, Shapes
from pdserve.sim.lengths import Lognormal

# The context that coding's lengths are given for; a longer one changes nothing.
CODING_CONTEXT = 131_072


@dataclass(frozen=True, slots=True)
class Preset:
    """shapes: lengths for a deployment whose longest request has so many tokens. burstiness: see OpenLoop."""

    name: str
    summary: str
    shapes: Callable[[int], Shapes]
    burstiness: float = 1.0

    def workload(self, longest_request: int, rate_per_s: float, num_requests: int, seed: int) -> OpenLoop:
        """Requests of this kind. longest_request: tokens of prompt and answer that fit."""
        return OpenLoop(rate_per_s, num_requests, self.shapes(longest_request), self.burstiness, seed)


def _chat(longest_request: int) -> Shapes:
    return Shape(_lognormal(350, 1.0, longest_request // 2), _lognormal(200, 0.8, longest_request // 4))


def _coding(longest_request: int) -> Shapes:
    scale = min(longest_request, CODING_CONTEXT) / CODING_CONTEXT
    answers = _lognormal(400, 0.8, longest_request // 8)
    long = Shape(_lognormal(36_000 * scale, 0.7, int(100_000 * scale)), answers)
    short = Shape(_lognormal(2_000 * scale, 0.8, int(8_000 * scale)), answers)
    return MixedShapes(((0.5, long), (0.5, short)))


def _lognormal(mean: float, sigma: float, most: int) -> Lognormal:
    """Where the bound is near the mean is lowered too, for not every draw to be cut."""
    most = max(most, 1)
    return Lognormal(max(1.0, min(mean, most / 2)), sigma, most)


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("chat", "short prompts, independent callers", _chat),
        Preset("coding", "long contexts beside short questions", _coding),
        Preset("burst", "chat in bursts: most gaps short, some long", _chat, burstiness=0.15),
    )
}


def preset(name: str) -> Preset:
    """Raises StartupError with the names there are."""
    if name not in PRESETS:
        raise StartupError(f"there is no workload {name}; give one of {', '.join(PRESETS)}")
    return PRESETS[name]

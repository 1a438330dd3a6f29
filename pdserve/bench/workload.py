"""Requests of mixed lengths out of one text, some of them given up by their caller. A seed is a workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

# Share of the prompts, and the range their lengths are drawn from: most are short, a few fill many chunks.
LENGTHS = ((0.60, 4, 96), (0.30, 96, 400), (0.08, 400, 900), (0.02, 1500, 2048))
NEW_TOKENS = (8, 48)
# Prompts that begin as others do, and how: whole blocks of it are found in the prefix caches.
SHARED_SHARE = 0.2
SHARED_TOKENS = 192
MAX_CANCEL_S = 20.0


@dataclass(frozen=True, slots=True)
class Cancel:
    """When a caller gives up: after this many seconds, or when this many tokens have come; else never."""

    after_s: float | None = None
    after_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. cancel: its caller's impatience, None for most."""

    number: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    cancel: Cancel | None


def make_asks(text: Sequence[int], num_asks: int, cancelled_share: float, seed: int) -> list[Ask]:
    """text: tokens, more than the longest prompt."""
    random = Random(seed)
    cancelled = set(random.sample(range(num_asks), round(num_asks * cancelled_share)))
    return [_ask(number, text, number in cancelled, random) for number in range(num_asks)]


def _ask(number: int, text: Sequence[int], is_cancelled: bool, random: Random) -> Ask:
    max_new_tokens = random.randint(*NEW_TOKENS)
    cancel = _cancel(max_new_tokens, random) if is_cancelled else None
    return Ask(number, _prompt(text, random), max_new_tokens, cancel)


def _prompt(text: Sequence[int], random: Random) -> tuple[int, ...]:
    (_, low, high) = random.choices(LENGTHS, [share for share, _, _ in LENGTHS])[0]
    length = random.randint(low, high)
    offset = random.randrange(len(text) - length)
    beginning = text[:SHARED_TOKENS] if random.random() < SHARED_SHARE else ()
    return (*beginning, *text[offset : offset + length])


def _cancel(max_new_tokens: int, random: Random) -> Cancel:
    if random.random() < 0.5:
        return Cancel(after_s=random.uniform(0, MAX_CANCEL_S))
    return Cancel(after_tokens=random.randrange(1, max_new_tokens))

"""How long prompts and answers are: distributions that a person can write in a word.

512                       always 512 tokens
uniform:64:1024           as likely 64 as 1,024 and all between
lognormal:512:0.9         mean 512, sigma 0.9 of the logarithm: most are short, some are long
lognormal:512:0.9:8192    the same, none longer than 8,192
0.9*256+0.1*uniform:4000:8000     a mix: nine in ten, one in ten
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Protocol

from pdserve.errors import StartupError

# Far beyond any model's context, and still a list of tokens that a machine can hold.
MOST_TOKENS = 10_000_000
# At 5 the longest of a thousand draws is a million times the middle one.
MOST_SIGMA = 5.0
FORMS = "N, uniform:LOW:HIGH, lognormal:MEAN:SIGMA[:MOST], or a mix such as 0.9*256+0.1*8000"


class Lengths(Protocol):
    """A distribution of a number of tokens, each at least 1."""

    def draw(self, random: Random) -> int: ...

    @property
    def mean(self) -> float:
        """Of many draws; of a bounded lognormal, before its bound."""


@dataclass(frozen=True, slots=True)
class Fixed:
    num_tokens: int

    def __post_init__(self) -> None:
        _require(1 <= self.num_tokens <= MOST_TOKENS, self.num_tokens, f"a length is 1 to {MOST_TOKENS:,} tokens")

    def draw(self, random: Random) -> int:
        return self.num_tokens

    @property
    def mean(self) -> float:
        return float(self.num_tokens)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Both ends included."""

    low: int
    high: int

    def __post_init__(self) -> None:
        is_range = 1 <= self.low <= self.high <= MOST_TOKENS
        _require(is_range, f"{self.low}:{self.high}", f"1 <= LOW <= HIGH <= {MOST_TOKENS:,}")

    def draw(self, random: Random) -> int:
        return random.randint(self.low, self.high)

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2


@dataclass(frozen=True, slots=True)
class Lognormal:
    """sigma: of the logarithm. most: longer draws are cut to it."""

    mean: float
    sigma: float
    most: int | None = None

    def __post_init__(self) -> None:
        is_known = 1 <= self.mean <= MOST_TOKENS and 0 <= self.sigma <= MOST_SIGMA
        _require(
            is_known,
            f"{self.mean:g}:{self.sigma:g}",
            f"1 <= MEAN <= {MOST_TOKENS:,} and 0 <= SIGMA <= {MOST_SIGMA:g}",
        )
        _require(self.most is None or self.most >= 1, self.most, "MOST is at least 1 token")

    def draw(self, random: Random) -> int:
        mu = math.log(self.mean) - self.sigma**2 / 2
        length = max(1, round(random.lognormvariate(mu, self.sigma)))
        return min(length, self.most or MOST_TOKENS)


@dataclass(frozen=True, slots=True)
class Mix:
    """Each part as often as its share says; shares are relative to each other."""

    parts: tuple[tuple[float, Lengths], ...]

    def __post_init__(self) -> None:
        shares = [share for share, _ in self.parts]
        _require(bool(shares) and min(shares) > 0, shares, "each share of a mix is more than 0")

    def draw(self, random: Random) -> int:
        (chosen,) = random.choices([part for _, part in self.parts], [share for share, _ in self.parts])
        return chosen.draw(random)

    @property
    def mean(self) -> float:
        return sum(share * part.mean for share, part in self.parts) / sum(share for share, _ in self.parts)


def parse_lengths(text: str, flag: str) -> Lengths:
    """The distribution that `text` writes. Raises StartupError, which names `flag`, where it writes none."""
    try:
        if "*" not in text:
            return _parse_one(text)
        return Mix(tuple(_parse_part(part) for part in text.split("+")))
    except ValueError:
        raise StartupError(f"{flag} {text} is no distribution; give {FORMS}") from None
    except StartupError as error:
        raise StartupError(f"{flag} {text}: {error.message}; give {FORMS}") from None


def _parse_part(text: str) -> tuple[float, Lengths]:
    share, _, one = text.partition("*")
    if not math.isfinite(float(share)):
        raise ValueError(share)
    return float(share), _parse_one(one)


def _parse_one(text: str) -> Lengths:
    kind, *numbers = text.strip().split(":")
    match kind, numbers:
        case "uniform", [low, high]:
            return Uniform(int(low), int(high))
        case "lognormal", [mean, sigma]:
            return Lognormal(_finite(mean), _finite(sigma))
        case "lognormal", [mean, sigma, most]:
            return Lognormal(_finite(mean), _finite(sigma), int(most))
        case number, []:
            return Fixed(int(number))
    raise ValueError(text)


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(text)
    return number


def _require(holds: bool, value: object, rule: str) -> None:
    if not holds:
        raise StartupError(f"{value}: {rule}")

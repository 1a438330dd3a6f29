"""Randomness without state: one uniform number a drawn token, a pure function of what the token is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

# Constants of splitmix64 (Steele, Lea and Flood 2014).
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

Words = NDArray[np.uint64]


def mix(words: Words) -> Words:
    """The finaliser of splitmix64: a bijection of 64 bits in which every bit of the input moves every one out."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def uniforms(seeds: Words, sample_indices: Words, positions: Words) -> NDArray[np.float64]:
    """In [0, 1), one a row: by the request's seed, which of its samples, and which token of the answer."""
    words = mix(seeds + _STEP)
    words = mix((words ^ sample_indices) + _STEP)
    words = mix((words ^ positions) + _STEP)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def word(value: int) -> int:
    """Any integer's low 64 bits, so that a negative seed is as good as another."""
    return value & 0xFFFFFFFFFFFFFFFF

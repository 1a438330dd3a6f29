"""Coefficients of what was measured: least squares of the relative error, none of them negative."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pdserve.errors import InternalError

Floats = npt.NDArray[np.float64]
TINY = 1e-12
LEAST_S = 1e-6


@dataclass(frozen=True, slots=True)
class Observation:
    """Something that took `seconds`, which is the sum of coefficient * parts[coefficient]."""

    what: str
    seconds: float
    parts: Mapping[str, float]

    def __post_init__(self) -> None:
        """Errors are shares of the seconds, which two tokens that came at once leave at nothing."""
        object.__setattr__(self, "seconds", max(self.seconds, LEAST_S))

    def predicted_s(self, coefficients: Mapping[str, float]) -> float:
        return sum(coefficients[name] * amount for name, amount in self.parts.items())

    def error(self, coefficients: Mapping[str, float]) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted_s(coefficients) / self.seconds - 1


def fit(observations: Sequence[Observation]) -> dict[str, float]:
    """Every coefficient that an observation names, none below zero.

    Raises InternalError where the observations don't tell the coefficients apart.
    """
    names = sorted({name for seen in observations for name in seen.parts})
    times_s = np.array([seen.seconds for seen in observations])
    parts = np.array([[seen.parts.get(name, 0.0) for name in names] for seen in observations])
    shares = parts / times_s[:, None]  # [observations, coefficients]: coefficients that are right make each row 1
    scale = np.abs(shares).max(axis=0)
    if np.linalg.matrix_rank(shares / scale) < len(names):
        raise InternalError(f"{len(observations)} observations don't tell {', '.join(names)} apart")
    found = _nonnegative(shares / scale, np.ones(len(shares))) / scale
    return {name: float(value) for name, value in zip(names, found, strict=True)}


def _nonnegative(matrix: Floats, wanted: Floats) -> Floats:
    """The x >= 0 that brings matrix @ x closest to wanted (Lawson and Hanson, Solving Least Squares Problems, 23)."""
    found = np.zeros(matrix.shape[1])
    is_free = np.zeros(len(found), bool)
    while not is_free.all():
        gains = np.where(is_free, -np.inf, matrix.T @ (wanted - matrix @ found))
        if gains.max() <= TINY:
            break
        is_free[gains.argmax()] = True
        while (best := _solved(matrix, wanted, is_free))[is_free].min() <= 0:
            below = is_free & (best <= 0)
            step = (found[below] / (found[below] - best[below])).min()
            found = found + step * (best - found)
            is_free &= found > TINY
            found[~is_free] = 0.0
        found = best
    return found


def _solved(matrix: Floats, wanted: Floats, is_free: npt.NDArray[np.bool_]) -> Floats:
    """Least squares with the others at zero."""
    found = np.zeros(matrix.shape[1])
    found[is_free] = np.linalg.lstsq(matrix[:, is_free], wanted, rcond=None)[0]
    return found

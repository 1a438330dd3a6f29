"""Drawing tokens: inverse transform sampling over the filtered distribution, in float64.

A row's distribution is softmax(logits / temperature), ordered by (probability descending, token id). Each filter keeps
a prefix of that order: min-p what has at least min_p of the best one's probability, top-k the first k of these, top-p
the shortest prefix with at least top_p of the mass that is left. The token is where the running sum passes u * mass.

The order beyond the best few hundred tokens rarely matters, and sorting a vocabulary is slow; so a row is first tried
on its best CANDIDATES with the exact mass of the rest, and only a row whose answer lies beyond them is sorted. Which
way a row takes depends on that row alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdserve.model.batch import Ints

Floats = NDArray[np.float64]

CANDIDATES = 256
# Rows handled at a time where whole vocabularies are held in float64.
ROWS_AT_A_TIME = 32


@dataclass(frozen=True, slots=True)
class Filters:
    """One value a row, [rows]. top_k 0, top_p 1 and min_p 0 are off; temperature is above 0."""

    temperature: Floats
    top_k: Ints
    top_p: Floats
    min_p: Floats

    def at(self, rows: Ints) -> Filters:
        return Filters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])


def draw(logits: Tensor, filters: Filters, uniforms: Floats) -> Ints:
    """logits [rows, vocab] float32, -inf where a token is banned; uniforms [rows] in [0, 1). Token ids [rows]."""
    tokens = np.empty(len(logits), np.int64)
    for first in range(0, len(logits), ROWS_AT_A_TIME):
        rows = np.arange(first, min(first + ROWS_AT_A_TIME, len(logits)))
        tokens[rows], is_found = _draw_from_best(logits[rows], filters.at(rows), uniforms[rows])
        beyond = rows[~is_found]
        if len(beyond):
            tokens[beyond] = _draw_from_all(logits[beyond], filters.at(beyond), uniforms[beyond])
    return tokens


def _draw_from_best(logits: Tensor, filters: Filters, uniforms: Floats) -> tuple[Ints, NDArray[np.bool_]]:
    """Tokens, and whether each is certain; the others' values mean nothing."""
    best = logits.topk(min(CANDIDATES, logits.shape[1]), dim=1, sorted=False)
    values, ids = _ordered(best.values.numpy(), best.indices.numpy())
    # Of the tokens that tie with the last candidate some may be missing, so the order is certain before them only.
    num_certain = np.full(len(values), values.shape[1])
    if values.shape[1] < logits.shape[1]:
        num_certain = (values > values[:, -1:]).sum(axis=1)
    weights = _weights(torch.from_numpy(values), values[:, :1], filters)
    kept = _num_kept(weights, filters)
    sums = np.cumsum(weights, axis=1)
    mass = _last(sums, kept)
    is_open = kept > num_certain  # the filters keep tokens beyond: the mass is a sum over the vocabulary
    if is_open.any():
        rows = np.flatnonzero(is_open)
        mass[rows] = _total_mass(logits[rows], values[rows, :1], filters.at(rows))
    index, is_inside = _pick(sums, np.minimum(kept, num_certain), mass, filters, uniforms)
    # top-k that ends beyond the candidates cuts the mass somewhere unknown.
    is_found = is_inside & ~(is_open & (filters.top_k > 0))
    return _take(ids, index), is_found | ~is_open


def _draw_from_all(logits: Tensor, filters: Filters, uniforms: Floats) -> Ints:
    values, ids = _ordered(logits.numpy(), np.arange(logits.shape[1]))
    weights = _weights(torch.from_numpy(values), values[:, :1], filters)
    kept = _num_kept(weights, filters)
    sums = np.cumsum(weights, axis=1)
    index, _ = _pick(sums, kept, _last(sums, kept), filters, uniforms)
    return _take(ids, index)


def _ordered(values: NDArray[np.float32], ids: Ints) -> tuple[NDArray[np.float32], Ints]:
    """Values descending, equal ones by id; values [rows, n], ids [rows, n] or [n].

    As one integer each, since numpy sorts those several times faster than anybody argsorts: the bits of a float, with
    the negative ones flipped, are ordered as it is; the id fills the low half.
    """
    bits = np.ascontiguousarray(values + np.float32(0)).view(np.uint32)  # + 0 makes -0 equal to 0
    ascending = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    keys = (~ascending).astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64)
    keys.sort(axis=1)
    ascending = ~(keys >> np.uint64(32)).astype(np.uint32)
    bits = np.where(ascending >> 31, ascending & np.uint32(0x7FFFFFFF), ~ascending)
    return bits.view(np.float32), (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


def _weights(logits: Tensor, best: NDArray[np.float32], filters: Filters) -> Floats:
    """Probabilities relative to the best token's, [rows, n] in [0, 1]."""
    scaled = logits.to(torch.float64, copy=True).sub_(torch.from_numpy(best))
    weights: Floats = scaled.div_(torch.from_numpy(filters.temperature)[:, None]).exp_().numpy()
    return weights


def _num_kept(weights: Floats, filters: Filters) -> Ints:
    """How many of the ordered weights min-p and top-k keep, [rows]; at least the best."""
    kept: Ints = ((weights >= filters.min_p[:, None]) & (weights > 0)).sum(axis=1)
    return np.where(filters.top_k > 0, np.minimum(kept, filters.top_k), kept)


def _total_mass(logits: Tensor, best: NDArray[np.float32], filters: Filters) -> Floats:
    weights = _weights(logits, best, filters)
    if filters.min_p.any():
        weights[weights < filters.min_p[:, None]] = 0
    mass: Floats = weights.sum(axis=1)
    return mass


def _pick(
    sums: Floats, num_usable: Ints, mass: Floats, filters: Filters, uniforms: Floats
) -> tuple[Ints, NDArray[np.bool_]]:
    """Where each row's token is in the order, [rows], and whether it is among the first num_usable.

    sums [rows, n]: running sums of the weights. Clamped to the usable ones, where rounding would step over the end.
    """
    nucleus = np.minimum((sums < (filters.top_p * mass)[:, None]).sum(axis=1), num_usable)
    is_cut = filters.top_p < 1
    kept_mass = np.where(is_cut, _last(sums, nucleus + 1), mass)
    index = (sums <= (uniforms * kept_mass)[:, None]).sum(axis=1)
    is_inside = (index < num_usable) & (~is_cut | (nucleus < num_usable))
    return np.clip(index, 0, np.maximum(num_usable - 1, 0)), is_inside


def _last(sums: Floats, counts: Ints) -> Floats:
    """The sum of the first counts[row] weights; of all, where there are fewer."""
    last: Floats = sums[np.arange(len(sums)), np.clip(counts, 1, sums.shape[1]) - 1]
    return last


def _take(ids: Ints, index: Ints) -> Ints:
    taken: Ints = ids[np.arange(len(ids)), index]
    return taken

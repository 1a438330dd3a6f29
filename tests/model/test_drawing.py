"""Filters and inverse transform sampling, against the definition written out row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pdserve.model import drawing
from pdserve.model.drawing import Filters, draw
from pdserve.model.noise import uniforms

OFF = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
KINDS = [
    {},
    {"temperature": 0.3},
    {"temperature": 5.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 100_000},
    {"top_p": 0.5},
    {"top_p": 1e-9},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.01, "temperature": 0.7},
]


def filters_of(kinds: list[dict[str, float]]) -> Filters:
    rows = [{**OFF, **kind} for kind in kinds]
    columns = {name: np.array([row[name] for row in rows], np.float64) for name in OFF}
    return Filters(columns["temperature"], columns["top_k"].astype(np.int64), columns["top_p"], columns["min_p"])


def by_definition(logits: np.ndarray, kind: dict[str, float], uniform: float) -> int:
    """One row, one step of the docstring after the other."""
    params = {**OFF, **kind}
    weights = np.exp((logits.astype(np.float64) - logits.max()) / params["temperature"])
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    kept = [token for token in order if weights[token] >= params["min_p"] and weights[token] > 0]
    kept = kept[: int(params["top_k"])] if params["top_k"] else kept
    sums = np.cumsum(weights[kept])
    if params["top_p"] < 1:
        sums = sums[: int(np.flatnonzero(sums >= params["top_p"] * sums[-1])[0]) + 1]
    return kept[min(int((sums <= uniform * sums[-1]).sum()), len(sums) - 1)]


@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0], ids=["uniform", "flat", "peaked"])
@pytest.mark.parametrize("candidates", [8, 64, 1000])
def test_every_filter_draws_what_the_definition_says(
    monkeypatch: pytest.MonkeyPatch, spread: float, candidates: int
) -> None:
    """Candidates fewer than, about, and more than what the filters keep: sorted or not, the token is the same."""
    monkeypatch.setattr(drawing, "CANDIDATES", candidates)
    rng = np.random.default_rng(candidates)
    # Rounded, so that there are ties to break.
    logits = np.round(rng.normal(0, spread, (len(KINDS), 300)), 1).astype(np.float32)
    logits[:, ::17] = -np.inf
    for noise in (0.0, 0.001, 0.37, 0.62, 0.93, 0.9999):
        tokens = draw(torch.from_numpy(logits.copy()), filters_of(KINDS), np.full(len(KINDS), noise))
        assert tokens.tolist() == [by_definition(*row, noise) for row in zip(logits, KINDS, strict=True)]


def test_a_row_draws_the_same_alone_and_in_any_batch() -> None:
    torch.manual_seed(0)
    logits = torch.randn(70, 2000) * 2
    kinds = [KINDS[row % len(KINDS)] for row in range(70)]
    noise = np.random.default_rng(0).random(70)
    together = draw(logits.clone(), filters_of(kinds), noise)
    for row in range(70):
        assert draw(logits[[row]], filters_of([kinds[row]]), noise[[row]]) == together[row]


def test_frequencies_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05, 0.0])
    count = 4000
    noise = uniforms(np.full(count, 9, np.uint64), np.zeros(count, np.uint64), np.arange(count, dtype=np.uint64))
    tokens = draw(probabilities.log().expand(count, -1), filters_of([{}] * count), noise)
    frequencies = np.bincount(tokens, minlength=5) / count
    assert frequencies[4] == 0
    assert np.abs(frequencies - probabilities.numpy()).max() < 0.03


def test_noise_is_even_and_moves_with_each_of_its_arguments() -> None:
    count = 10_000
    zeros, counting = np.zeros(count, np.uint64), np.arange(count, dtype=np.uint64)
    for arguments in ((counting, zeros, zeros), (zeros, counting, zeros), (zeros, zeros, counting)):
        noise = uniforms(*arguments)
        assert ((noise >= 0) & (noise < 1)).all()
        assert len(np.unique(noise)) == count
        assert np.abs(np.histogram(noise, 10, (0, 1))[0] / count - 0.1).max() < 0.02
        assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.05
    assert len(np.unique(np.concatenate([uniforms(counting, zeros, zeros), uniforms(zeros, counting, zeros)]))) > count

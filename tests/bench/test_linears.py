from __future__ import annotations

import torch

from pdserve.bench.linears import fastest_ms, products_of


def test_a_round_is_all_products_once_and_the_first_does_not_count() -> None:
    calls: list[int] = []

    def product(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return x

    assert fastest_ms([product, product], [torch.ones(3, 1), torch.ones(3, 1)], repeats=2) > 0
    assert calls == [3] * 6


def test_every_kind_multiplies_by_the_same_matrices() -> None:
    torch.manual_seed(1)
    weights, x = [torch.randn(20, 40), torch.randn(7, 40)], torch.randn(3, 40)
    kinds = products_of(weights, kernel=None)
    assert list(kinds) == ["F.linear", "packed", "8 bits", "4 bits"]
    for products in kinds.values():
        for weight, product in zip(weights, products, strict=True):
            expected = x @ weight.T
            assert (product(x) - expected).norm() < 0.2 * expected.norm()

from __future__ import annotations

import torch

from pdserve.bench.linears import fastest_ms


def test_a_round_is_all_products_once_and_the_first_does_not_count() -> None:
    calls: list[int] = []

    def product(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return x

    assert fastest_ms([product, product], [torch.ones(3, 1), torch.ones(3, 1)], repeats=2) > 0
    assert calls == [3] * 6

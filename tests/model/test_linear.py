"""A product is what float64 makes of it, and a row's is the same bits whoever shares its round."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from pdserve.model import linear
from pdserve.model.linear import Linear

# The embedded model's, a tiny model's, and one that no vector length divides.
SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576), (48, 80), (33, 47)]
NUM_ROWS = 300
THREADS = (1, 2)


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def may_pack(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(linear, "is_packing_possible", lambda: False)
    return bool(request.param)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_this_torch_can_pack() -> None:
    assert linear.is_packing_possible()


@pytest.mark.usefixtures("may_pack")
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 64])
def test_a_product_is_right(num_in: int, num_out: int, has_bias: bool, num_rows: int) -> None:
    torch.manual_seed(1)
    weight, x = torch.randn(num_out, num_in), torch.randn(num_rows, num_in)
    bias = torch.randn(num_out) if has_bias else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    found = Linear(weight, bias)(x)
    assert found.shape == (num_rows, num_out)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6 * num_in)


def test_rows_that_do_not_lie_together_are_read_right() -> None:
    torch.manual_seed(2)
    weight, wide = torch.randn(40, 24), torch.randn(6, 72)
    x = wide[:, 24:48]
    torch.testing.assert_close(Linear(weight)(x), F.linear(x, weight), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
def test_a_row_s_bits_do_not_depend_on_who_shares_its_round(num_in: int, num_out: int) -> None:
    torch.manual_seed(3)
    multiply, x = Linear(torch.randn(num_out, num_in)), torch.randn(NUM_ROWS, num_in)
    torch.set_num_threads(1)
    alone = torch.cat([multiply(row[None]) for row in x])
    for num_threads in THREADS:
        torch.set_num_threads(num_threads)
        for num_rows in (2, 3, 8, 15, 16, 100, NUM_ROWS):
            together = torch.cat([multiply(part) for part in x.split(num_rows)])
            assert torch.equal(together, alone), (num_threads, num_rows)

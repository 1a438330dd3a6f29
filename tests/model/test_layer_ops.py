"""The kernel's operations equal torch's, whatever the shapes, and a row's result is its own."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pdserve.model.layer_ops import TORCH_OPS, LayerOps, NativeOps, TorchOps, build_ops

EPS = 1e-5
ROWS = (0, 1, 2, 7, 300)


@pytest.fixture(scope="module")
def native(kernel_cache: Path) -> LayerOps:
    return NativeOps(kernel_cache)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 3


def assert_close(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 15, 64, 576, 577])
@pytest.mark.parametrize("is_added", [False, True])
def test_norm_equals_torch_and_adds_in_place(native: LayerOps, rows: int, width: int, is_added: bool) -> None:
    weight, delta = normal(width, seed=1), normal(rows, width, seed=2) if is_added else None
    ours, theirs = normal(rows, width), normal(rows, width)
    assert_close(native.add_and_norm(ours, delta, weight, EPS), TORCH_OPS.add_and_norm(theirs, delta, weight, EPS))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 16), (12, 64), (5, 10)])
def test_rotation_equals_torch_within_wider_rows(native: LayerOps, rows: int, heads: int, head_dim: int) -> None:
    whole = normal(rows, heads + 4, head_dim)
    angles = normal(rows, 1, head_dim // 2, seed=1)
    wanted = TORCH_OPS.rotate(whole[:, :heads].clone(), angles.cos(), angles.sin())
    rest = whole[:, heads:].clone()
    assert_close(native.rotate(whole[:, :heads], angles.cos(), angles.sin()), wanted)
    assert torch.equal(whole[:, heads:], rest)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("heads", "head_dim"), [(1, 2), (3, 16), (12, 128), (5, 10)])
def test_norm_of_heads_equals_torch_within_wider_rows(native: LayerOps, rows: int, heads: int, head_dim: int) -> None:
    whole, weights = normal(rows, heads + 4, head_dim), normal(heads, head_dim, seed=1)
    wanted = TORCH_OPS.norm_heads(whole[:, :heads], weights, EPS)
    rest = whole[:, heads:].clone()
    assert_close(native.norm_heads(whole[:, :heads], weights, EPS), wanted)
    assert torch.equal(whole[:, heads:], rest)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [1, 31, 1536])
def test_gating_equals_torch(native: LayerOps, rows: int, width: int) -> None:
    gate_up = normal(rows, 2 * width)
    assert_close(native.silu_and_multiply(gate_up), TORCH_OPS.silu_and_multiply(gate_up))


def test_gating_is_right_far_from_zero(native: LayerOps) -> None:
    gates = torch.tensor([-1e30, -200.0, -88.0, -20.0, -1e-20, 0.0, 1e-20, 20.0, 88.0, 200.0, 1e30])
    gate_up = torch.cat([gates, torch.ones(len(gates))])[None]
    torch.testing.assert_close(
        native.silu_and_multiply(gate_up), TORCH_OPS.silu_and_multiply(gate_up), rtol=1e-5, atol=1e-8
    )


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_rows_bits_do_not_depend_on_who_shares_its_round(native: LayerOps, num_threads: int) -> None:
    before = torch.get_num_threads()
    x, gate_up, weight = normal(300, 576), normal(300, 600, seed=1), normal(576, seed=2)
    torch.set_num_threads(num_threads)
    try:
        normed, gated = native.add_and_norm(x.clone(), None, weight, EPS), native.silu_and_multiply(gate_up)
        for first, last in ((0, 1), (5, 7), (100, 300)):
            assert torch.equal(native.add_and_norm(x[first:last].clone(), None, weight, EPS), normed[first:last])
            assert torch.equal(native.silu_and_multiply(gate_up[first:last]), gated[first:last])
    finally:
        torch.set_num_threads(before)


def test_without_a_compiler_torch_does_it_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert isinstance(build_ops(tmp_path, "no-such-compiler"), TorchOps)
    assert len(caplog.records) == 1
    assert "no C compiler" in caplog.text

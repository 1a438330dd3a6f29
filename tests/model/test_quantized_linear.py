"""A product of quantised numbers is the exact one but for the last roundings, on every CPU's instructions, and a
row's is the same bits whoever shares its call."""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.errors import StartupError
from pdserve.model.native_build import NativeUnavailable
from pdserve.model.quantized_linear import GROUP, Bits, Kernel, QuantizedLinear, load_kernel, quantize

# The embedded model's, and some that no tile, group or vector divides.
SHAPES = [(576, 960), (1536, 576), (64, 16), (33, 47), (1, 1), (31, 100)]
# What a CPU may lack, taken from this one.
FLAGS: dict[str, tuple[str, ...]] = {
    "native": (),
    "no avx512-vnni": ("-mno-avx512vnni",),
    "no vnni": ("-mno-avx512vnni", "-mno-avxvnni"),
    "plain": ("-march=x86-64",),
}

both_widths = pytest.mark.parametrize("bits", [4, 8])


@pytest.fixture(scope="module")
def kernel(kernel_cache: Path) -> Kernel:
    return Kernel(kernel_cache)


@pytest.fixture(scope="module")
def kernels(kernel_cache: Path) -> dict[str, Kernel]:
    """One for every set of instructions that this CPU has."""
    if platform.machine() != "x86_64":
        return {"native": Kernel(kernel_cache)}
    return {name: Kernel(kernel_cache, "cc", *flags) for name, flags in FLAGS.items()}


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def draw_case(num_in: int, num_out: int, num_rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Weights and activations; groups of both differ in size."""
    torch.manual_seed(seed)
    weight = torch.randn(num_out, num_in) * 0.1 + torch.randn(num_out, 1) * 0.02
    return weight, torch.randn(num_rows, num_in) * torch.logspace(-3, 3, num_in)


def round_activations(x: Tensor) -> Tensor:
    """float64, what the kernel's 8 bits stand for: [rows, groups * GROUP]."""
    groups = F.pad(x, (0, -x.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    codes = torch.where(largest > 0, (groups * (127 / largest)).round(), 0.0)
    return (codes.double() * (largest / 127).double()).flatten(1)


def exact_product(weight: Tensor, bits: Bits, x: Tensor) -> tuple[Tensor, Tensor]:
    """float64 of the same quantised numbers, and what the product's size would be without cancellation."""
    quantized = quantize(weight, bits)
    scales, minimums = quantized.scales.double()[..., None], quantized.minimums.double()[..., None]
    rounded = round_activations(x)
    exact = rounded @ (quantized.codes * scales + minimums).flatten(1).T
    size = rounded.abs() @ (quantized.codes * scales + minimums.abs()).flatten(1).T
    return exact, size


@both_widths
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("num_rows", [0, 1, 2, 7, 8, 9, 61])
def test_a_product_is_that_of_the_quantised_numbers(
    kernel: Kernel, bits: Bits, num_in: int, num_out: int, has_bias: bool, num_rows: int
) -> None:
    weight, x = draw_case(num_in, num_out, num_rows)
    bias = torch.randn(num_out) if has_bias else None
    exact, size = exact_product(weight, bits, x)
    found = QuantizedLinear(weight, bits, bias, kernel=kernel)(x)
    if bias is not None:
        exact, size = exact + bias, size + bias.abs()
    assert found.shape == (num_rows, num_out)
    assert found.dtype == torch.float32
    assert ((found - exact).abs() <= 1e-6 * size).all()


@both_widths
@pytest.mark.parametrize("has_kernel", [True, False], ids=["kernel", "torch"])
def test_a_product_is_close_to_that_of_the_whole_numbers(kernel: Kernel, bits: Bits, has_kernel: bool) -> None:
    """Of normally distributed numbers: 4 bits lose about 8 % of the result's size, 8 bits about 0.7 %."""
    torch.manual_seed(1)
    weight, x = torch.randn(960, 576), torch.randn(61, 576)
    plain = F.linear(x, weight)
    found = QuantizedLinear(weight, bits, kernel=kernel if has_kernel else None)(x)
    assert (found - plain).norm() / plain.norm() < {4: 0.1, 8: 0.01}[bits]


@both_widths
@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
def test_every_set_of_instructions_finds_the_same(
    kernels: dict[str, Kernel], bits: Bits, name: str, num_in: int, num_out: int
) -> None:
    if name not in kernels:
        pytest.skip("another CPU family")
    weight, x = draw_case(num_in, num_out, 13)
    exact, size = exact_product(weight, bits, x)
    assert ((QuantizedLinear(weight, bits, kernel=kernels[name])(x) - exact).abs() <= 1e-6 * size).all()


@both_widths
@pytest.mark.parametrize("name", FLAGS)
def test_no_sum_of_the_greatest_codes_overflows(kernels: dict[str, Kernel], bits: Bits, name: str) -> None:
    """Two products of 8-bit codes are beyond what AVX2's own instruction for bytes can hold."""
    if name not in kernels:
        pytest.skip("another CPU family")
    weight = torch.ones(16, GROUP)
    weight[:, 0] = 0.0
    for x in (torch.full((1, GROUP), 127.0), torch.full((1, GROUP), -127.0)):
        exact, size = exact_product(weight, bits, x)
        found = QuantizedLinear(weight, bits, kernel=kernels[name])(x)
        assert ((found - exact).abs() <= 1e-6 * size).all()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86-64")
def test_the_flags_take_the_instructions_away(kernels: dict[str, Kernel]) -> None:
    assert kernels["plain"].instructions == "plain"
    assert "vnni" not in kernels["no vnni"].instructions
    assert kernels["no avx512-vnni"].instructions != "avx512-vnni"


@both_widths
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("num_in", "num_out"), SHAPES)
def test_a_row_s_bits_do_not_depend_on_who_shares_its_round(
    kernel: Kernel, bits: Bits, num_in: int, num_out: int
) -> None:
    weight, x = draw_case(num_in, num_out, 300)
    multiply = QuantizedLinear(weight, bits, kernel=kernel)
    torch.set_num_threads(1)
    alone = torch.cat([multiply(row[None]) for row in x])
    for num_threads, sizes in ((1, (2, 3, 4, 5, 6, 7, 8, 9, 100, 299, 300)), (2, (31, 100, 299, 300))):
        torch.set_num_threads(num_threads)
        for num_rows in sizes:
            together = torch.cat([multiply(part) for part in x.split(num_rows)])
            assert torch.equal(together, alone), (num_threads, num_rows)
    for num_rows in range(1, 10):
        assert torch.equal(multiply(x[:num_rows]), alone[:num_rows]), num_rows


@both_widths
@pytest.mark.parametrize("turned", [False, True], ids=["rows apart", "columns apart"])
def test_rows_that_do_not_lie_together_are_read_right(kernel: Kernel, bits: Bits, turned: bool) -> None:
    torch.manual_seed(2)
    multiply = QuantizedLinear(torch.randn(40, 24), bits, kernel=kernel)
    x = torch.randn(24, 6).T if turned else torch.randn(6, 72)[:, 24:48]
    assert not x.is_contiguous()
    assert torch.equal(multiply(x), multiply(x.contiguous()))


# ---------------------------------------------------------------- numbers at the ends


@both_widths
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1e30])
def test_activations_of_any_size_are_rounded_alike(kernel: Kernel, bits: Bits, size: float) -> None:
    weight, x = draw_case(70, 20, 5)
    exact, bound = exact_product(weight, bits, x * size)
    assert ((QuantizedLinear(weight, bits, kernel=kernel)(x * size) - exact).abs() <= 1e-6 * bound).all()


@both_widths
@pytest.mark.parametrize("value", [0.0, 1e-40, -1e-40, 1e-36])
def test_activations_that_are_next_to_nothing_count_as_zeros(kernel: Kernel, bits: Bits, value: float) -> None:
    found = QuantizedLinear(torch.randn(20, 70), bits, kernel=kernel)(torch.full((3, 70), value))
    assert torch.equal(found, torch.zeros(3, 20))


@both_widths
def test_an_outlier_spoils_its_own_group_only(kernel: Kernel, bits: Bits) -> None:
    weight, x = draw_case(96, 20, 2)
    x[:, 40] = 1e6
    weight[:, 40] = 0.0
    multiply = QuantizedLinear(weight, bits, kernel=kernel)
    rest = torch.cat((x[:, :32], torch.zeros(2, 32), x[:, 64:]), dim=1)
    exact, size = exact_product(weight, bits, rest)
    alone = torch.zeros_like(x)
    alone[:, 40] = 1e6
    # The outlier's own group has codes for nothing else.
    assert torch.equal(round_activations(x)[:, 32:64].count_nonzero(dim=1), torch.ones(2, dtype=torch.int64))
    of_outlier, outlier_size = exact_product(weight, bits, alone)
    assert ((multiply(x) - exact - of_outlier).abs() <= 1e-6 * (size + outlier_size)).all()


@both_widths
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_shows_in_its_row_alone(kernel: Kernel, bits: Bits, value: float) -> None:
    weight, x = draw_case(70, 20, 10)
    multiply = QuantizedLinear(weight, bits, kernel=kernel)
    clean = multiply(x)
    x[3, 65] = value
    found = multiply(x)
    assert found[3].isnan().all()
    rest = [row for row in range(10) if row != 3]
    assert torch.equal(found[rest], clean[rest])


# ---------------------------------------------------------------- weights


def draw_blocks(num_out: int, num_groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """codes, scales, minimums as 4-bit files have them; every block has its least and greatest code."""
    codes = torch.randint(0, 16, (num_out, num_groups, GROUP), dtype=torch.uint8)
    codes[..., 3], codes[..., 17] = 0, 15
    scales = (torch.rand(num_out, num_groups) * 0.05 + 1e-3).half()
    return codes, scales, -(torch.rand(num_out, num_groups) * 0.4).half()


def test_weights_of_a_4_bit_file_keep_their_codes() -> None:
    torch.manual_seed(4)
    codes, scales, minimums = draw_blocks(200, 18)
    weight = (codes * scales.float()[..., None] + minimums.float()[..., None]).flatten(1)
    found = quantize(weight, 4)
    assert torch.equal(found.codes, codes)
    assert torch.equal(found.scales, scales)
    assert torch.equal(found.minimums, minimums)
    assert torch.equal(found.weight(), weight)


@both_widths
def test_a_weight_is_within_little_more_than_half_a_step(bits: Bits) -> None:
    """The scale's and the minimum's own rounding comes on top."""
    weight, _ = draw_case(100, 50, 1)
    quantized = quantize(weight, bits)
    step = quantized.scales.float().repeat_interleave(GROUP, dim=1)[:, :100]
    found = quantized.weight()[:, :100]
    assert ((found - weight).abs() <= 0.7 * step).all()
    assert (found - weight).pow(2).mean().sqrt() < 0.3 * step.mean()


def test_codes_make_up_for_the_minimum_s_rounding_as_far_as_they_reach() -> None:
    """Halves near 100 are 1/16 apart: 100.03 becomes 100, and codes that count from there end at 100.1."""
    weight = torch.linspace(100.03, 100.13, GROUP)[None]
    quantized = quantize(weight, 8)
    error = (quantized.weight() - weight).abs()
    within_reach = weight < 100.095
    assert within_reach.sum() > GROUP // 2
    assert (error[within_reach] <= 0.7 * quantized.scales.float()).all()
    assert (error <= 1 / 32).all()


@both_widths
def test_equal_weights_need_no_scale(kernel: Kernel, bits: Bits) -> None:
    multiply = QuantizedLinear(torch.full((16, 64), 0.25), bits, kernel=kernel)
    torch.testing.assert_close(multiply(torch.ones(2, 64)), torch.full((2, 16), 16.0))


@both_widths
@pytest.mark.parametrize("value", [1e5, torch.inf, torch.nan])
def test_weights_that_a_half_cannot_hold_are_refused(bits: Bits, value: float) -> None:
    weight = torch.ones(3, 40)
    weight[1, 35] = value
    with pytest.raises(StartupError, match="half precision"):
        quantize(-weight, bits)


@both_widths
def test_many_rows_are_quantised_as_few_are(bits: Bits, monkeypatch: pytest.MonkeyPatch) -> None:
    weight, _ = draw_case(40, 50, 1)
    whole = quantize(weight, bits)
    monkeypatch.setattr("pdserve.model.quantized_linear.ROWS_AT_A_TIME", 7)
    assert torch.equal(quantize(weight, bits).weight(), whole.weight())


def test_four_bits_take_5_bits_a_weight_and_eight_take_9(kernel: Kernel) -> None:
    weight = torch.randn(96, 64)
    for bits, in_all in ((4, 5), (8, 9)):
        assert QuantizedLinear(weight, bits, kernel=kernel).num_bytes == weight.numel() * in_all // 8
    assert QuantizedLinear(weight, 4, kernel=None).num_bytes == weight.nbytes


# ---------------------------------------------------------------- without a kernel


def test_without_a_compiler_one_line_says_so_and_torch_multiplies_by_the_same_weights(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kernel: Kernel
) -> None:
    with pytest.raises(NativeUnavailable, match="not found"):
        Kernel(tmp_path, "no-such-compiler")
    with caplog.at_level(logging.WARNING):
        missing = load_kernel(tmp_path, "no-such-compiler")
    assert missing is None
    assert len(caplog.records) == 1
    assert "no-such-compiler" in caplog.text
    weight, x = draw_case(70, 20, 5)
    bias = torch.randn(20)
    found = QuantizedLinear(weight, 4, bias, kernel=None)(x)
    torch.testing.assert_close(found, F.linear(x, quantize(weight, 4).weight()[:, :70], bias), rtol=1e-5, atol=1e-3)
    # The same to within the rounding of the activations: 1/254 of a group's greatest.
    with_kernel = QuantizedLinear(weight, 4, bias, kernel=kernel)(x)
    assert (found - with_kernel).norm() / found.norm() < 0.02


def test_a_kernel_that_can_be_built_is_loaded_without_a_word(
    kernel_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load_kernel(kernel_cache) is not None
    assert not caplog.records

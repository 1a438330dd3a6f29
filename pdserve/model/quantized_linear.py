"""Matrices of 4 or 8 bits, multiplied by a C kernel that brings the activations to 8 bits (kernels/quantized_linear.h).

Decoding reads every weight once a round, so that it costs what the bytes cost: with 4 bits, less than a sixth of
float32's. Prompts gain as an instruction multiplies four bytes where it multiplied one float.

    w ≈ scale * code + minimum    one scale and minimum for GROUP weights of an output, along the inner dimension
    x ≈ scale * code              one scale for GROUP activations of a row, codes -127 to 127

Where the kernel can't be built, torch multiplies by what the codes stand for, in float32: the same model to within the
activations' rounding, with neither the memory nor the time saved.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.errors import StartupError
from pdserve.model.linear import Linear
from pdserve.model.native_build import KERNELS, NativeUnavailable, load_library

log = logging.getLogger(__name__)

Bits = Literal[4, 8]

SOURCE = KERNELS / "quantized_linear.c"
# As quantized_linear.h has them.
GROUP = 32
TILE = 16
ROW_BLOCK = 8
ACTIVATION_BYTES = GROUP + 8  # of a group of a row: codes, scale, sum
# Weights quantised at a time, so that a large matrix is not copied as a whole for each step.
ROWS_AT_A_TIME = 4096


class PackedMatrix(ctypes.Structure):
    """matrix_t of quantized_linear.h, field by field."""

    _fields_ = [
        ("tiles", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("bits", ctypes.c_int64),
        ("num_in", ctypes.c_int64),
        ("num_out", ctypes.c_int64),
        ("num_groups", ctypes.c_int64),
        ("num_tiles", ctypes.c_int64),
    ]


class Kernel:
    """The built kernel, which runs without the GIL. One serves all matrices, and any thread."""

    def __init__(self, cache_dir: Path, compiler: str = "cc", *extra_flags: str) -> None:
        """Kept in `cache_dir`/native. Raises NativeUnavailable."""
        library = load_library(SOURCE, "pdserve_quantized_linear", cache_dir / "native", compiler, *extra_flags)
        self._run = library.pdserve_quantized_linear
        pointer, count = ctypes.c_void_p, ctypes.c_int64
        self._run.argtypes = [ctypes.POINTER(PackedMatrix), pointer, count, count, pointer, pointer, count]
        self._run.restype = None
        library.pdserve_quantized_linear_instructions.restype = ctypes.c_char_p
        # What it uses of the CPU: avx512-vnni, avx-vnni, avx2, plain.
        self.instructions: str = library.pdserve_quantized_linear_instructions().decode()

    @property
    def is_fast(self) -> bool:
        """Whether it multiplies bytes by vector instructions; else float32 is faster."""
        return self.instructions != "plain"

    def multiply(self, matrix: PackedMatrix, x: Tensor, out: Tensor, scratch: Tensor) -> None:
        """x [rows, in] float32, a row's values together; out [rows, out], scratch as quantized_linear.h says."""
        pointers = out.data_ptr(), scratch.data_ptr()
        self._run(matrix, x.data_ptr(), x.stride(0), len(x), *pointers, torch.get_num_threads())


def load_kernel(cache_dir: Path, compiler: str = "cc") -> Kernel | None:
    """Built where needed, under `cache_dir`; None where it can't be, with one log line that says why."""
    try:
        return Kernel(cache_dir, compiler)
    except NativeUnavailable as reason:
        log.warning("quantised weights are kept and multiplied as float32, nothing is gained by them: %s", reason)
        return None


class QuantizedLinear:
    """x -> x @ weight.T + bias, with the weight in `bits` and x in 8. The weight is copied, and not kept."""

    def __init__(self, weight: Tensor, bits: Bits, bias: Tensor | None = None, *, kernel: Kernel | None) -> None:
        """weight [out, in] float32, bias [out]. kernel None: torch multiplies.

        Raises StartupError where the weights are not finite or beyond half precision.
        """
        self._num_out, self._num_in = weight.shape
        quantized = quantize(weight, bits)
        self._kernel = kernel
        self._plain = None if kernel else Linear(quantized.weight()[:, : self._num_in], bias)
        if kernel is None:
            return
        # What the kernel's matrix points into.
        self._tiles = tiles_of(quantized)
        num_tiles, num_groups, _ = self._tiles.shape
        self._bias = None if bias is None else F.pad(bias.float(), (0, num_tiles * TILE - self._num_out))
        self._packed = PackedMatrix(
            tiles=self._tiles.data_ptr(),
            bias=None if self._bias is None else self._bias.data_ptr(),
            bits=bits,
            num_in=self._num_in,
            num_out=self._num_out,
            num_groups=num_groups,
            num_tiles=num_tiles,
        )

    @property
    def num_bytes(self) -> int:
        """Of the weights as they are kept."""
        return self._tiles.nbytes if self._kernel else 4 * self._num_out * self._num_in

    @property
    def packed(self) -> PackedMatrix | None:
        """What a kernel takes, which lives as long as this does; None where torch multiplies."""
        return self._packed if self._kernel else None

    @property
    def num_groups(self) -> int:
        """Of a row's activations."""
        return -(-self._num_in // GROUP)

    def scratch_bytes(self, num_rows: int) -> int:
        """That the kernel needs for the activations."""
        return -(-num_rows // ROW_BLOCK) * ROW_BLOCK * self.num_groups * ACTIVATION_BYTES

    def __call__(self, x: Tensor) -> Tensor:
        """x [rows, in] -> [rows, out]."""
        assert x.dtype == torch.float32, x.dtype
        assert x.shape[1] == self._num_in, (x.shape, self._num_in)
        if self._kernel is None:
            assert self._plain is not None
            return self._plain(x)
        if x.stride(1) != 1:
            x = x.contiguous()
        out, scratch = x.new_empty(len(x), self._num_out), torch.empty(self.scratch_bytes(len(x)), dtype=torch.uint8)
        self._kernel.multiply(self._packed, x, out, scratch)
        return out


# ---------------------------------------------------------------- quantising


@dataclass(frozen=True, slots=True)
class Quantized:
    """A matrix in groups along its inner dimension, padded with zeros to whole ones.

    Scales and minimums are halves, as those of published 4-bit files are: rounded to one, the scale found from such a
    file's weights is the file's again. In float32 they would add a fifth to what decoding with 4 bits reads.
    """

    bits: Bits
    codes: Tensor  # [out, groups, GROUP] uint8
    scales: Tensor  # [out, groups] float16
    minimums: Tensor  # [out, groups] float16

    def weight(self) -> Tensor:
        """[out, groups * GROUP] float32: what the codes stand for."""
        scales, minimums = self.scales.float()[..., None], self.minimums.float()[..., None]
        return (self.codes * scales + minimums).flatten(1)


def quantize(weight: Tensor, bits: Bits) -> Quantized:
    """weight [out, in]: each group's least value has code 0, its greatest the highest code.

    Raises StartupError where a group's ends are not finite or beyond half precision.
    """
    parts = [_quantize_rows(rows.float(), bits) for rows in torch.split(weight.detach(), ROWS_AT_A_TIME)]
    codes, scales, minimums = (torch.cat(column) for column in zip(*parts, strict=True))
    return Quantized(bits, codes, scales, minimums)


def _quantize_rows(weight: Tensor, bits: Bits) -> tuple[Tensor, Tensor, Tensor]:
    groups = F.pad(weight, (0, -weight.shape[1] % GROUP)).view(len(weight), -1, GROUP)
    highest = 2**bits - 1
    least, greatest = groups.aminmax(dim=-1)
    scales, minimums = ((greatest - least) / highest).half(), least.half()
    if not (scales.isfinite().all() and minimums.isfinite().all()):
        raise StartupError(
            f"weights from {weight.min():g} to {weight.max():g} cannot be quantised: half precision ends at 65504"
        )
    # The codes are chosen for the scale and minimum as rounded. A group of equal weights has no scale, and codes of 0.
    steps = scales.float().where(scales > 0, torch.inf)
    codes = (groups - minimums.float()[..., None]).div_(steps[..., None]).round_().clamp_(0, highest)
    return codes.to(torch.uint8), scales, minimums


def tiles_of(quantized: Quantized) -> Tensor:
    """[tiles, groups, bytes of a tile's group] uint8, in the order that quantized_linear.h reads."""
    num_padded = -len(quantized.codes) % TILE
    codes = F.pad(quantized.codes, (0, 0, 0, 0, 0, num_padded))
    # [tile, column, group, sub-block, 4] -> [tile, group, sub-block, column, 4]
    ordered = codes.view(-1, TILE, codes.shape[1], GROUP // 4, 4).permute(0, 2, 3, 1, 4)
    if quantized.bits == 4:
        ordered = ordered[:, :, 0::2] | ordered[:, :, 1::2] << 4
    halves = [_by_tile(F.pad(values, (0, 0, 0, num_padded))) for values in (quantized.scales, quantized.minimums)]
    return torch.cat([*halves, ordered.flatten(2)], dim=2)


def _by_tile(values: Tensor) -> Tensor:
    """[tiles * TILE, groups] float16 -> their bytes, [tiles, groups, 2 * TILE]."""
    return values.view(-1, TILE, values.shape[1]).transpose(1, 2).contiguous().view(torch.uint8)

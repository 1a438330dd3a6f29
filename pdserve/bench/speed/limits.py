"""The least time that a round or a prompt could take here: what it has to read and to multiply, at this machine's best.

    memory      weights as they are kept, once a round or chunk, and the KV of every token in sight
    products    the matrices', of 4 or 8 bits in integers, of float32 in floats
    attention   in floats, of a prompt in pairs of halves where KV is that and the CPU can

Memory is read while the cores multiply, products and attention follow each other: the least time is the longer of the
two. A model that fits the processor's caches may be faster than its memory.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

from pdserve.bench.speed.cells import Cell
from pdserve.bench.speed.in_process import CHUNK
from pdserve.bench.speed.model_size import ModelSize, Part
from pdserve.model.native_build import KERNELS, NativeUnavailable, load_library

# More than caches hold, of all threads and of each.
READ_BYTES, READ_BYTES_A_THREAD = 512 << 20, 64 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """What the machine's cores can do at most together; a product and its sum are two operations."""

    bytes_per_s: float
    int4_ops_per_s: float
    int8_ops_per_s: float
    float_ops_per_s: float
    half_ops_per_s: float

    def __str__(self) -> str:
        rates = (self.int4_ops_per_s, self.int8_ops_per_s, self.float_ops_per_s, self.half_ops_per_s)
        four, eight, floats, halves = (f"{rate / 1e9:,.0f}" for rate in rates)
        return (
            f"at most {self.bytes_per_s / 1e9:.1f} GB/s of memory, "
            f"{four} Gop/s of 4-bit weights, {eight} of 8-bit ones, {floats} of floats, {halves} of halves in chunks"
        )

    def products_s(self, part: Part, rows: int) -> float:
        """Of a part's weights by so many rows."""
        rates = {4: self.int4_ops_per_s, 8: self.int8_ops_per_s, 32: self.float_ops_per_s}
        return 2 * part.num_weights * rows / rates[part.bits]


@dataclass(frozen=True, slots=True)
class Floor:
    """The least times, of each kind."""

    memory_s: float
    products_s: float
    attention_s: float

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.products_s + self.attention_s)

    @property
    def bound_by(self) -> str:
        """What the time goes to first."""
        if self.memory_s >= self.products_s + self.attention_s:
            return "memory"
        return "products" if self.products_s >= self.attention_s else "attention"


@dataclass(frozen=True, slots=True)
class Compared:
    """share: the least time, as a share of what was measured. bound_by: what the least time goes to first."""

    share: float
    bound_by: str


def measure_limits(num_threads: int, cache_dir: Path, compiler: str = "cc") -> Limits:
    """In about half a second; the kernel is kept in `cache_dir`/native. Raises NativeUnavailable."""
    library = load_library(KERNELS / "limits.c", "pdserve_float_rate", cache_dir / "native", compiler)

    def rate(name: str, *arguments: int) -> float:
        function = library[f"pdserve_{name}_rate"]
        function.argtypes, function.restype = [ctypes.c_int64] * (len(arguments) + 1), ctypes.c_double
        return float(function(*arguments, num_threads))

    num_bytes = max(READ_BYTES, READ_BYTES_A_THREAD * num_threads)
    bytes_per_s = rate("read", num_bytes)
    if not bytes_per_s:
        raise NativeUnavailable(f"there is no room for {num_bytes >> 20} MiB to read")
    return Limits(
        bytes_per_s=bytes_per_s,
        int4_ops_per_s=rate("dot", 4),
        int8_ops_per_s=rate("dot", 8),
        float_ops_per_s=rate("float", 32),
        half_ops_per_s=rate("float", 16),
    )


def decode_floor(size: ModelSize, limits: Limits, batch: int, context: int) -> Floor:
    """Of a round that gives each of `batch` requests a token, with so many tokens in sight of each."""
    num_pairs = batch * context
    return Floor(
        memory_s=(size.num_bytes + num_pairs * size.kv_bytes) / limits.bytes_per_s,
        products_s=sum(limits.products_s(part, batch) for part in size.parts),
        attention_s=num_pairs * size.attention_ops / limits.float_ops_per_s,
    )


def prompt_floor(size: ModelSize, limits: Limits, num_tokens: int) -> Floor:
    """Of a prompt to its first token, in chunks of CHUNK. The head multiplies the last token only."""
    ends = [*range(CHUNK, num_tokens, CHUNK), num_tokens]
    rate = limits.half_ops_per_s if size.has_half_kv else limits.float_ops_per_s
    num_bytes = len(ends) * size.layers.num_bytes + size.head.num_bytes + sum(ends) * size.kv_bytes
    return Floor(
        memory_s=num_bytes / limits.bytes_per_s,
        products_s=limits.products_s(size.layers, num_tokens) + limits.products_s(size.head, 1),
        attention_s=num_tokens**2 / 2 * size.attention_ops / rate,
    )


def cell_floor(size: ModelSize, limits: Limits, cell: Cell) -> Floor:
    """Of a cell's prompt, or of one of its rounds, when its answers are half written."""
    if cell.is_of_prompt:
        return prompt_floor(size, limits, cell.num_prompt_tokens)
    return decode_floor(size, limits, cell.num_streams, cell.num_prompt_tokens + cell.num_tokens // 2)


def compare(size: ModelSize, limits: Limits, cell: Cell, tokens_per_s: float) -> Compared:
    floor = cell_floor(size, limits, cell)
    num_tokens = cell.num_prompt_tokens if cell.is_of_prompt else cell.num_streams
    return Compared(floor.seconds * tokens_per_s / num_tokens, floor.bound_by)

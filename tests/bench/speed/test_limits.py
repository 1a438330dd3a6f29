"""How close to the machine's limits a cell comes: what those are, and the least time by numbers made by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.bench.speed import limits as module
from pdserve.bench.speed.cells import Cell
from pdserve.bench.speed.in_process import CHUNK
from pdserve.bench.speed.limits import Limits, compare, decode_floor, measure_limits, prompt_floor
from pdserve.bench.speed.model_size import ModelSize, Part, model_size
from pdserve.bench.tiny_model import QUICK, make_model
from pdserve.config import Quantization, cache_dir
from pdserve.model.matrices import Matrices
from pdserve.model.mlp import DenseMlp
from pdserve.model.model_config import read_config
from pdserve.model.native_build import NativeUnavailable
from pdserve.model.quantized_linear import QuantizedLinear
from pdserve.model.weights import load_weights

# With their groups' scales, the layers' 32,000 weights of 4 bits are 20,000 bytes, the head's 320 of 8 bits 360.
SIZE = ModelSize(Part(1000 * 32, 4), Part(320, 8), kv_bytes=8, attention_ops=12, has_half_kv=False)
LIMITS = Limits(1000.0, int4_ops_per_s=64e3, int8_ops_per_s=640.0, float_ops_per_s=600.0, half_ops_per_s=900.0)


def test_weights_are_counted_with_their_groups_scales() -> None:
    assert Part(32, 4).num_bytes == 16 + 4
    assert Part(32, 8).num_bytes == 32 + 4
    assert Part(32, 32).num_bytes == 128


def test_a_decode_round_reads_all_weights_and_the_kv_in_sight_of_each_row() -> None:
    floor = decode_floor(SIZE, LIMITS, batch=2, context=10)
    assert floor.memory_s == pytest.approx((20_000 + 360 + 2 * 10 * 8) / 1000)
    assert floor.products_s == pytest.approx(2 * 2 * 32_000 / 64e3 + 2 * 2 * 320 / 640)
    assert floor.attention_s == pytest.approx(2 * 10 * 12 / 600)
    assert (floor.bound_by, floor.seconds) == ("memory", floor.memory_s)


@pytest.mark.parametrize(
    ("batch", "context", "bound_by"), [(1, 1, "memory"), (64, 1, "products"), (64, 10_000, "attention")]
)
def test_what_takes_longest_binds(batch: int, context: int, bound_by: str) -> None:
    assert decode_floor(SIZE, LIMITS, batch, context).bound_by == bound_by


def test_products_and_attention_follow_each_other_while_memory_is_read() -> None:
    floor = decode_floor(SIZE, LIMITS, batch=64, context=2000)
    assert floor.seconds == floor.products_s + floor.attention_s > floor.memory_s


def test_products_of_floats_are_at_the_rate_of_floats() -> None:
    assert LIMITS.products_s(Part(300, 32), rows=1) == 1.0


def test_a_prompt_reads_the_layers_once_a_chunk_and_the_head_once() -> None:
    num_tokens = 2 * CHUNK + 100
    floor = prompt_floor(SIZE, LIMITS, num_tokens)
    in_sight = CHUNK + 2 * CHUNK + num_tokens
    assert floor.memory_s == pytest.approx((3 * 20_000 + 360 + in_sight * 8) / 1000)
    assert floor.products_s == pytest.approx(2 * num_tokens * 32_000 / 64e3 + 2 * 320 / 640)
    assert floor.attention_s == pytest.approx(num_tokens**2 / 2 * 12 / 600)
    of_halves = prompt_floor(replace(SIZE, has_half_kv=True), LIMITS, num_tokens)
    assert of_halves.attention_s == pytest.approx(num_tokens**2 / 2 * 12 / 900)


def test_a_cell_is_compared_with_its_prompt_s_or_its_round_s_least_time() -> None:
    prompt, answers = Cell("p", 1, 600, 1), Cell("d", 4, 60, 40)
    least_s = prompt_floor(SIZE, LIMITS, 600).seconds
    assert compare(SIZE, LIMITS, prompt, 600 / least_s).share == pytest.approx(1.0)
    # Half its speed is half the limit.
    least_s = decode_floor(SIZE, LIMITS, 4, 80).seconds
    assert compare(SIZE, LIMITS, answers, 4 / least_s / 2).share == pytest.approx(0.5)


def test_the_machine_s_limits_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_BYTES", 32 << 20)
    monkeypatch.setattr(module, "READ_BYTES_A_THREAD", 0)
    found = measure_limits(1, cache_dir())
    # Wide of what any core does: an instruction left out, or one too many, is far off.
    assert 1e9 < found.bytes_per_s < 1e12
    assert 5e8 < found.float_ops_per_s < 1e12
    assert 5e8 < found.int8_ops_per_s <= 1.2 * found.int4_ops_per_s
    assert found.int4_ops_per_s < 4e12
    assert 0.8 * found.float_ops_per_s < found.half_ops_per_s < 2e12
    assert "GB/s of memory" in str(found)


def test_a_kernel_that_cannot_be_built_is_told(tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailable, match="no C compiler"):
        measure_limits(1, tmp_path, "no-such-compiler")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_model_s_weights_are_as_many_bytes_as_its_matrices_keep(quantization: Quantization, tmp_path: Path) -> None:
    directory = make_model(tmp_path / "model", QUICK)
    config = read_config(directory)
    weights = load_weights(directory, config, matrices=Matrices(quantization, cache_dir()))
    kept = []
    for layer in weights.layers:
        assert isinstance(layer.mlp, DenseMlp)
        kept += [layer.qkv, layer.attention_output, layer.mlp.gate_up, layer.mlp.down]
    size = model_size(config, quantization)
    assert size.layers.num_bytes == sum(matrix.num_bytes for matrix in kept if isinstance(matrix, QuantizedLinear))
    assert isinstance(weights.lm_head, QuantizedLinear)
    assert size.head.num_bytes == weights.lm_head.num_bytes
    # k and v of 6 heads of 32 halves in 4 layers; for each query head, two products over the head's dimension.
    assert (size.kv_bytes, size.attention_ops) == (2 * 6 * 32 * 4 * 2, 2 * 2 * 32 * 6 * 4)

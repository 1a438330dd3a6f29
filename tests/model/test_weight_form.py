"""The form of weights that is chosen where none is asked for, and that the log says why."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from pdserve.config import QuantizationSetting
from pdserve.model import weight_form
from pdserve.model.model_config import read_config
from pdserve.model.quantized_linear import Kernel, quantize
from pdserve.model.weight_form import SAMPLED, choose_form, choose_kv_dtype
from tests.model.small_models import save


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    save("llama", tmp_path)
    return tmp_path


def chosen(directory: Path, cache_dir: Path, setting: QuantizationSetting = "auto") -> str:
    return choose_form(setting, directory, read_config(directory), cache_dir)


def round_to_4_bits(directory: Path, layers: tuple[int, ...]) -> None:
    """What a checkpoint of 4 bits looks like once it is spelled out in float32."""
    path = directory / "model.safetensors"
    weights = load_file(path)
    for name, weight in weights.items():
        if any(f"layers.{layer}.self_attn" in name for layer in layers):
            weights[name] = quantize(weight, 4).weight()[:, : weight.shape[1]].contiguous()
    save_file(weights, path, metadata={"format": "pt"})


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine whose vector instructions multiply bytes."""
    monkeypatch.setattr(Kernel, "is_fast", True)


@pytest.mark.usefixtures("fast")
def test_any_weights_get_8_bits(directory: Path, kernel_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert chosen(directory, kernel_cache) == "int8"
    assert "weights are kept in int8: it is fast and close to exact; products round activations" in caplog.text


@pytest.mark.usefixtures("fast")
def test_weights_published_in_4_bits_keep_them(
    directory: Path, kernel_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    round_to_4_bits(directory, layers=(0, 1, 2))
    with caplog.at_level(logging.INFO):
        assert chosen(directory, kernel_cache) == "int4"
    assert "published in 4 bits" in caplog.text


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("rounded", [(0,), (2,)], ids=["the last is not", "the first is not"])
def test_a_layer_of_more_bits_is_seen_at_either_end(
    directory: Path, kernel_cache: Path, rounded: tuple[int, ...]
) -> None:
    round_to_4_bits(directory, rounded)
    assert chosen(directory, kernel_cache) == "int8"


def test_a_slow_machine_keeps_floats(
    directory: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Kernel, "is_fast", False)
    with caplog.at_level(logging.INFO):
        assert chosen(directory, kernel_cache) == "fp32"
    assert "no fast kernel" in caplog.text
    monkeypatch.setattr(weight_form, "load_kernel", lambda _: None)
    assert chosen(directory, kernel_cache) == "fp32"


@pytest.mark.parametrize("setting", ["fp32", "int8", "int4"])
def test_what_is_asked_for_is_taken(
    tmp_path: Path, kernel_cache: Path, setting: QuantizationSetting, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path
    save("llama", directory)
    with caplog.at_level(logging.INFO):
        assert chosen(directory, kernel_cache, setting) == setting
    assert f"weights are kept in {setting}: as --quantization says" in caplog.text


def test_kv_is_rounded_where_weights_are() -> None:
    assert choose_kv_dtype("auto", "fp32") == "float32"
    assert choose_kv_dtype("auto", "int8") == choose_kv_dtype("auto", "int4") == "bfloat16"
    assert choose_kv_dtype("bfloat16", "fp32") == "bfloat16"
    assert choose_kv_dtype("float32", "int4") == "float32"


def test_what_is_sampled_is_there_in_every_family(directory: Path) -> None:
    names = load_file(directory / "model.safetensors").keys()
    assert all(f"model.layers.0.self_attn.{name}.weight" in names for name in SAMPLED)

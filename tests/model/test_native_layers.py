"""All layers in one call are the same bits as step by step; what the kernel does not cover goes step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.config import Quantization
from pdserve.kv.storage import KVStorage
from pdserve.model import forward, native_layers
from pdserve.model.attention.native_cpu import NativeAttention
from pdserve.model.layer_ops import TORCH_OPS, LayerOps, NativeOps
from pdserve.model.matrices import Matrices
from pdserve.model.model_config import read_config
from pdserve.model.native_layers import PARTS, NativeLayers, build_layers
from pdserve.model.shard import WHOLE
from pdserve.model.torch_runner import load
from pdserve.model.weights import load_weights
from pdserve.request import TokenRequest
from tests.model.conftest import Answer
from tests.model.small_models import save

FAMILIES = ("llama", "qwen2-bias", "qwen3-norm")
NUM_BLOCKS, BLOCK_SIZE = 64, 16


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    save(request.param, directory)
    return directory


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_a_round_is_the_same_bits_as_step_by_step(
    directory: Path,
    kernel_cache: Path,
    request_of: Callable[..., TokenRequest],
    server_of: Any,
    quantization: Quantization,
    num_threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built: list[NativeLayers | None] = []

    def answers() -> list[Answer]:
        config = read_config(directory)
        storage = KVStorage(config.kv_layout(BLOCK_SIZE), NUM_BLOCKS)
        storage.slab.view(torch.float32).fill_(torch.nan)
        loading = {"max_slots": 4, "max_model_len": 256, "cache_dir": kernel_cache, "num_threads": num_threads}
        runner = load(directory, config, storage, quantization=quantization, **loading)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(3)
        prompts = [torch.randint(6, 211, (count,), generator=generator).tolist() for count in (1, 23, 130, 161)]
        wants = {"num_logprobs": 210, "prompt_logprobs": 0}
        requests = [request_of(str(number), prompt, 12, **wants) for number, prompt in enumerate(prompts)]
        served: list[Answer] = server_of(runner, storage, chunk=150).serve(requests)
        return served

    def build(*args: Any) -> NativeLayers | None:
        built.append(build_layers(*args))
        return built[-1]

    monkeypatch.setattr(forward, "build_layers", build)
    native = answers()
    monkeypatch.setattr(forward, "build_layers", lambda *_: None)
    for ours, theirs in zip(native, answers(), strict=True):
        assert ours.output == theirs.output
        assert ours.logprobs == theirs.logprobs
        assert ours.prompt_logprobs == theirs.prompt_logprobs
    (layers,) = built
    assert layers is not None
    assert all(layers.seconds()[part] > 0 for part in PARTS)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    save("llama", directory)
    return directory


def build_for(
    directory: Path, cache_dir: Path, quantization: Quantization = "int4", ops: LayerOps | None = None
) -> NativeLayers | None:
    config = read_config(directory)
    storage = KVStorage(config.kv_layout(BLOCK_SIZE), 1)
    weights = load_weights(directory, config, matrices=Matrices(quantization, cache_dir))
    attention = NativeAttention(storage, config.num_heads, cache_dir / "native")
    return build_layers(config, weights, attention, ops or NativeOps(cache_dir), WHOLE, cache_dir)


def test_what_the_kernel_does_not_cover_goes_step_by_step(llama: Path, kernel_cache: Path) -> None:
    assert build_for(llama, kernel_cache) is not None
    assert build_for(llama, kernel_cache, "fp32") is None
    assert build_for(llama, kernel_cache, ops=TORCH_OPS) is None


def test_without_the_kernel_it_goes_step_by_step_and_says_so(
    llama: Path, kernel_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise native_layers.NativeUnavailable("no C compiler")

    ops = NativeOps(kernel_cache)
    monkeypatch.setattr(native_layers, "load_library", refuse)
    assert build_for(llama, kernel_cache, ops=ops) is None
    assert "no C compiler" in caplog.text

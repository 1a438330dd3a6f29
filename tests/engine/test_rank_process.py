"""From a spec to a warm rank, with the weights left out."""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from pdserve.engine import building, rank_process
from pdserve.engine.launch import RankSpec, TierSpec, TransportSpec
from pdserve.engine.messages import FromRank, FromTransport, Loading, Ready, StartFailed, Stop
from pdserve.errors import StartupError
from pdserve.kv.storage import KVStorage
from pdserve.model.fake import FakeRunner
from pdserve.transfer.loopback import LoopbackNetwork, LoopbackTransport
from tests.engine.other_end import OtherEnd, other_end
from tests.engine.specs import SMALL

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "eos_token_id": 299,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"model.norm.weight": torch.ones(8)}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that needs none, over the transport that needs no network card."""

    def load(
        directory: Path, config: object, storage: KVStorage, *, max_slots: int, max_model_len: int, **rest: object
    ) -> FakeRunner:
        progress = rest["progress"]
        assert callable(progress)
        progress("loading weights", 1, 1)
        return FakeRunner(storage, 300, max_slots, max_model_len)

    network = LoopbackNetwork()
    slabs: list[KVStorage] = []

    class Storage(KVStorage):
        def __init__(self, *args: object) -> None:
            super().__init__(*args)  # type: ignore[arg-type]
            slabs.append(self)

    def transport(name: str, base: int, num_blocks: int, block_bytes: int) -> LoopbackTransport:
        assert (base, num_blocks) == (slabs[-1].data_ptr, slabs[-1].num_blocks)
        return LoopbackTransport(network, name, slabs[-1].slab.numpy())

    monkeypatch.setattr(building, "load", load)
    monkeypatch.setattr(building, "KVStorage", Storage)
    monkeypatch.setattr(building, "NixlTransport", transport)
    monkeypatch.setattr(rank_process, "configure_logging", lambda *_: None)
    # It would bind this process to its parent, and make it deaf to signals.
    monkeypatch.setattr(rank_process, "_end_with_parent", lambda: None)


@pytest.fixture
def front(sockets: Path) -> Iterator[OtherEnd]:
    with (
        other_end(f"ipc://{sockets}/loop", FromRank) as front,
        other_end(f"ipc://{sockets}/transport", FromTransport),
    ):
        yield front


def spec(directory: Path, sockets: Path, **changes: object) -> RankSpec:
    whole = msgspec.structs.replace(
        SMALL,
        model_directory=str(directory),
        model_revision="r7",
        cache_directory=str(directory),
        endpoint=f"ipc://{sockets}/loop",
        transport=TransportSpec("me", f"ipc://{sockets}/transport", 30.0, 120.0),
    )
    return msgspec.structs.replace(whole, **changes)


def run(told: bytes, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(told)))
    return rank_process.main()


def run_and_stop(front: OtherEnd, whole: RankSpec, monkeypatch: pytest.MonkeyPatch) -> int:
    """A rank that is told to stop as soon as it is connected."""
    stopping = threading.Thread(target=front.send, args=(Stop(),))
    stopping.start()
    status = run(msgspec.msgpack.encode(whole), monkeypatch)
    stopping.join()
    return status


def test_a_rank_is_ready_after_a_real_forward_and_leaves_on_stop(
    directory: Path, sockets: Path, front: OtherEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_and_stop(front, spec(directory, sockets), monkeypatch) == 0
    ready = front.hear(Ready)
    stages = [(said.stage, said.done, said.total) for said in front.seen if isinstance(said, Loading)]
    assert stages == [("loading weights", 1, 1), *(("warming up", done, 3) for done in (1, 2, 3))]
    assert ready.longest_chunk_s > 0
    assert (ready.num_blocks, ready.max_model_len, ready.vocab_size, ready.eos_token_ids) == (16, 512, 300, (299,))
    assert (ready.fingerprint.architecture, ready.fingerprint.block_size) == ("LlamaForCausalLM", 64)
    assert ready.fingerprint.model_revision == "r7"
    assert ready.transport_metadata


def test_a_rank_without_a_transport_has_no_metadata(
    directory: Path, sockets: Path, front: OtherEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_and_stop(front, spec(directory, sockets, transport=None), monkeypatch) == 0
    assert front.hear(Ready).transport_metadata == b""


def test_a_rank_with_quantised_weights_is_no_peer_of_one_with_the_others(
    directory: Path, sockets: Path, front: OtherEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_and_stop(front, spec(directory, sockets, quantization="int8"), monkeypatch) == 0
    ours = front.hear(Ready).fingerprint
    assert ours.differences(replace(ours, model_revision="r7")) == ("model_revision: 'r7+int8' here, 'r7' there",)


def test_a_pool_smaller_than_the_context_shortens_it(
    directory: Path, sockets: Path, front: OtherEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_and_stop(front, spec(directory, sockets, num_kv_blocks=2, transport=None), monkeypatch) == 0
    assert front.hear(Ready).max_model_len == 128


FAILURES = {
    "a context beyond the model's": ({"max_model_len": 513}, "--max-model-len 513 is beyond the model's 512 positions"),
    "more blocks than memory": ({"num_kv_blocks": 1 << 40}, "--num-kv-blocks 1099511627776 needs"),
    "a host tier of no block": ({"tiers": TierSpec(host_bytes=1)}, "--host-kv-gb holds no KV block of 0.0 MiB"),
    "a host tier larger than memory": (
        {"tiers": TierSpec(host_bytes=1 << 50)},
        "--host-kv-gb 1.1259e+06 is more than the ",
    ),
    "no such model": ({"model_directory": "/nowhere"}, "/nowhere"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_rank_that_cannot_start_says_why_and_ends(
    directory: Path, sockets: Path, front: OtherEnd, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    changes, message = FAILURES[name]
    assert run(msgspec.msgpack.encode(spec(directory, sockets, **changes)), monkeypatch) == 2
    assert message in front.hear(StartFailed).message


def test_a_rank_that_runs_out_of_memory_names_the_flags(
    directory: Path, sockets: Path, front: OtherEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: object, **rest: object) -> FakeRunner:
        raise MemoryError

    monkeypatch.setattr(building, "load", load)
    assert run(msgspec.msgpack.encode(spec(directory, sockets)), monkeypatch) == 2
    assert "lower --num-kv-blocks or --kv-memory-fraction" in front.hear(StartFailed).message


def test_a_rank_without_a_spec_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StartupError, match="not by hand"):
        run(b"", monkeypatch)

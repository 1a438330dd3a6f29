"""The whole measurement, on real nodes of a tiny model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.bench.deployed import fused
from pdserve.bench.policy_runs import Model
from pdserve.bench.serve import run as running
from pdserve.bench.serve.figures import Slo
from pdserve.bench.serve.loads import ClosedLoad, Limit, Load, LongPromptLoad, Material, PoissonLoad
from pdserve.bench.serve.run import measure
from pdserve.bench.serve.servers import Connect, Kind, deployed
from pdserve.bench.tiny_model import make_model
from pdserve.commands.bench import main
from pdserve.errors import StartupError
from pdserve.model.progress import no_progress
from pdserve.sim.arrivals import Shape
from pdserve.sim.lengths import Uniform
from tests.bench.serve.fakes import FakeServer, refused

TEXT = tuple(range(200))
MATERIAL = Material(TEXT, Shape(Uniform(5, 60), Uniform(2, 8)), timeout_s=60.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_model(tmp_path_factory.mktemp("model")), TEXT)


def fake(name: str, server: FakeServer) -> Kind:
    @contextlib.contextmanager
    def start() -> Iterator[Connect]:
        yield lambda: contextlib.nullcontext(server)

    return Kind(name, start, is_started=False)


def test_servers_take_turns_and_one_that_does_not_start_is_told() -> None:
    def fail() -> contextlib.AbstractContextManager[Connect]:
        raise StartupError("no room")

    good, refusing = FakeServer(), FakeServer(refused)
    loads: list[Load] = [ClosedLoad(2, MATERIAL, Limit(num_requests=4)), PoissonLoad(100.0, MATERIAL, Limit(None, 3))]
    kinds = [fake("good", good), fake("refusing", refusing), Kind("none", fail)]
    results = measure(kinds, loads, Slo(), 2, no_progress)
    assert results.broken == {"none": "no room"}
    assert good.calls == refusing.calls
    assert [(call.number, call.num_output_tokens) for call in good.calls[:4]] == [
        (call.number, call.num_output_tokens) for call in good.calls[7:11]
    ]
    closed, poisson = (results.measured[load.name] for load in loads)
    assert [run.figures["num_requests"] for run in closed["good"].runs] == [4, 4]
    assert closed["refusing"].medians["num_refused"] == poisson["refusing"].medians["num_refused"] == 1
    assert closed["none"].runs == []
    assert not results.is_whole


@pytest.mark.system
@pytest.mark.parametrize("name", ["fused", "pair"])
def test_a_real_deployment_answers_every_load(name: str, model: Model) -> None:
    loads: list[Load] = [
        ClosedLoad(3, MATERIAL, Limit(num_requests=6)),
        LongPromptLoad(2, 400, MATERIAL),
        PoissonLoad(20.0, MATERIAL, Limit(num_requests=4)),
    ]
    kind = deployed(name, "fp32", model, 4, {"chunked_prefill_size": 128})
    results = measure([kind], loads, Slo(60.0, 60.0), 1, no_progress)
    assert results.is_whole
    for load in loads:
        (one,) = results.measured[load.name].values()
        found = one.medians
        assert (found["num_failed"], found["goodput"], found["strict_goodput"]) == (0, 1.0, 1.0), one.failures()
        assert found["cpu_s"] > 0
        assert found["peak_mib"] > 50
        assert found["num_cached_tokens"] == 0
    assert results.measured[loads[0].name][f"{name} fp32"].medians["num_requests"] == 6
    beside = results.measured[loads[1].name][f"{name} fp32"].medians
    assert beside["long_ttft_s"] > 0


@pytest.mark.system
def test_the_command_asks_a_node_that_runs_already_and_writes_what_is_asked_for(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(running, "diary", lambda: "a few words " * 20)
    files = {name: tmp_path / f"x.{name}" for name in ("json", "png", "markdown")}
    written = [word for name, path in files.items() for word in (f"--{name}", str(path))]
    with fused(model, num_kv_blocks=64, num_threads=1) as node:
        words = ["serve", "--address", node.address, "--streams", "2", "--requests", "4", "--repeats", "2"]
        lengths = ["--prompt-tokens", "uniform:5:40", "--output-tokens", "4"]
        assert main([*words, *lengths, *written]) == 0
    found = json.loads(files["json"].read_text())["loads"]["2 streams"][node.address]
    assert [one["num_requests"] for one in found["repeats"]] == [4, 4]
    assert "cpu_s" not in found["medians"]
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    assert f"pdserve bench serve --address {node.address}" in files["markdown"].read_text()
    assert "TTFT p50, s" in capsys.readouterr().out

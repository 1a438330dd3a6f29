"""`pdserve bench speed`: which engines there are to measure, and a run of it on real nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdserve import cli
from pdserve.bench.policy_runs import Model
from pdserve.bench.speed import arguments, command, run
from pdserve.bench.speed.cells import Cell
from pdserve.bench.speed.machine import this_machine
from pdserve.bench.tiny_model import QUICK, make_model
from pdserve.commands.arguments import read


def install(peers: Path, name: str) -> None:
    library = peers / name / "lib" / "python3.11" / "site-packages" / name
    for path in (peers / name / "bin" / "python", library / "__init__.py"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (library.parent / f"{name}-4.8.5.dist-info").mkdir()


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["bench", "speed", *words]) == 2
    return capsys.readouterr().err


def test_an_engine_that_is_not_installed_is_told_with_what_installs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "transformers")
    said = refused(capsys, "--peers", str(tmp_path), "--engines", "transformers", "vllm-bf16", "llama-server")
    assert f"--engines vllm-bf16: is not in {tmp_path}; `make bench-speed` installs it" in said
    assert f"--engines llama-server: is not in {tmp_path}" in said
    assert "--engines transformers" not in said


def test_every_wrong_argument_is_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--engines", "vllmx", "--cells", "x", "--repeats", "0", "--quantization", "fp8")
    for fault in ("--engines vllmx: give one of engine,", "--cells x: ", "--repeats 0: ", "--quantization fp8: "):
        assert f"\n  {fault}" in said


def test_llama_cpp_runs_the_embedded_model_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("build/bin/llama-server", "model.gguf"):
        path = tmp_path / "llama.cpp" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    said = refused(capsys, "--peers", str(tmp_path), "--engines", "llama-server", "--model", "other")
    assert "--engines llama-server: runs the embedded model only" in said


def test_all_that_are_installed_are_measured_where_none_is_named(tmp_path: Path) -> None:
    install(tmp_path, "ctranslate2")
    given = read(command._parser(), ["--peers", str(tmp_path)])
    assert command.chosen_engines(given) == ["engine", "fused", "pair", "ctranslate2-fp32", "ctranslate2-int8"]
    assert given.quantization == ["fp32", "int8", "int4"]


def test_every_peer_that_may_be_named_can_be_made(tmp_path: Path) -> None:
    install(tmp_path, "ctranslate2")
    assert set(run.PEERS) == set(command.PEERS)
    setting = run.Setting(Model(tmp_path, (1,)), [Cell("c", 1, 4, 1)], tmp_path, tmp_path, num_threads=1)
    made = {name: run.engines_of(name, setting, ["fp32"]) for name in (*command.OURS, *command.PEERS)}
    assert all(len(engines) == 1 for engines in made.values())
    assert {name for name, (engine,) in made.items() if engine.is_peer} == set(command.PEERS)
    assert {name for name, (engine,) in made.items() if engine.is_over_grpc} == {"fused", "pair"}
    assert made["ctranslate2-int8"][0].version == "4.8.5"
    assert made["vllm-bf16"][0].version == "unknown"


def test_the_machine_says_what_it_is() -> None:
    machine = this_machine()
    assert machine.cpu
    assert machine.cores >= 1
    assert machine.memory_gib > 0


@pytest.mark.system
def test_a_run_on_real_nodes_prints_tables_and_writes_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(make_model(tmp_path / "model", QUICK), tuple(range(200)))
    monkeypatch.setattr(arguments, "CELLS", (Cell("one", 1, 30, 1), Cell("two", 2, 10, 5)))
    monkeypatch.setattr(arguments, "QUICK", ("one", "two"))
    monkeypatch.setattr(run.Model, "of", lambda directory: model)
    figures, tables = tmp_path / "figures.json", tmp_path / "tables.md"
    words = ["--model", str(model.directory), "--engines", "fused", "--quantization", "fp32", "--repeats", "2"]
    assert cli.main(["bench", "speed", *words, "--json", str(figures), "--markdown", str(tables)]) == 0
    (row,) = json.loads(figures.read_text())["engines"]
    assert (row["engine"], row["weights"], row["reasons"]) == ("fused", "fp32", {})
    assert {cell: len(speeds) for cell, speeds in row["tokens_per_s"].items()} == {"one": 2, "two": 2}
    assert min(row["started_s"]) > 0
    assert min(row["peak_mib"]) > 50
    assert "fused fp32" in capsys.readouterr().out
    assert "pdserve bench speed --model" in tables.read_text()

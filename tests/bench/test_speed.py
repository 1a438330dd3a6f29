"""What the cells of the table of speeds are made of, and the engine that is measured alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from pdserve.bench.listening import Heard
from pdserve.bench.policy_runs import Model
from pdserve.bench.speed import arguments
from pdserve.bench.speed import engine as command
from pdserve.bench.speed.cells import CELLS, QUICK, Cell
from pdserve.bench.speed.in_process import Engine, Profile
from pdserve.bench.tiny_model import QUICK as TINY
from pdserve.bench.tiny_model import make_model
from pdserve.commands.bench import main

TEXT = range(200)


def heard(*arrivals_s: float, called_s: float = 0.0) -> Heard:
    return Heard(0, called_s, arrivals_s)


def test_a_prompt_s_speed_is_by_the_time_to_its_token() -> None:
    assert Cell("prompt", 1, 1000, 1).tokens_per_s([heard(4.0, called_s=2.0)]) == 500.0


def test_answers_count_while_all_of_them_are_written() -> None:
    cell = Cell("answers", 2, 8, 4)
    both = [heard(1.0, 2.0, 3.0, 4.0), heard(2.0, 3.0, 4.0, 5.0)]
    # From 2 to 4: two tokens of each in two seconds.
    assert cell.tokens_per_s(both) == 2.0


def test_prompts_of_a_cell_have_nothing_in_common() -> None:
    calls = [call for repeat in range(2) for call in Cell("c", 4, 64, 2).calls(TEXT, repeat)]
    assert len({call.prompt[:16] for call in calls}) == 8
    assert set(QUICK) <= {cell.name for cell in CELLS}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_model(tmp_path_factory.mktemp("model"), TINY), tuple(TEXT))


@pytest.fixture(scope="module")
def tiny_engine(model: Model) -> Engine:
    return Engine(model.directory, max_tokens=1024, max_num_seqs=4, num_threads=1)


def test_the_engine_answers_every_call_to_its_end_and_its_time_is_told_by_part(
    tiny_engine: Engine, model: Model
) -> None:
    profile = tiny_engine.profile = Profile()
    with profile.watching():
        answers = tiny_engine.hear_all(Cell("c", 4, 40, 7).calls(model.text, 0))
    assert [len(answer.arrivals_s) for answer in answers] == [7] * 4
    assert profile.num_rounds >= 7
    shares = profile.shares()
    assert {"matrices", "attention", "sampling", "batch", "other"} == set(shares)
    assert math.isclose(sum(shares.values()), 1.0)
    assert min(shares.values()) > 0


def test_quality_is_that_of_the_text_s_tokens(tiny_engine: Engine) -> None:
    text = list(TEXT)
    assert tiny_engine.nll(text) == pytest.approx(tiny_engine.nll(text), rel=1e-6)
    assert tiny_engine.nll(text) != pytest.approx(tiny_engine.nll(text[::-1]), rel=1e-3)


def test_the_command_prints_a_table_and_writes_the_figures(
    model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(arguments, "CELLS", (Cell("one", 1, 30, 1), Cell("two", 2, 10, 5)))
    monkeypatch.setattr(arguments, "QUICK", ("one", "two"))
    monkeypatch.setattr(command.Model, "of", lambda directory: model)
    file = tmp_path / "figures.json"
    words = ["engine", "--model", str(model.directory), "--repeats", "1", "--threads", "1", "--json", str(file)]
    assert main([*words, "--quantization", "fp32", "int8"]) == 0
    forms = json.loads(file.read_text())["forms"]
    assert [(form["quantization"], [row["cell"] for row in form["rows"]]) for form in forms] == [
        ("fp32", ["one", "two"]),
        ("int8", ["one", "two"]),
    ]
    assert "tokens/s" in capsys.readouterr().out
    assert abs(forms[0]["nll"] - forms[1]["nll"]) < 0.05

"""Libraries in processes of their own: the lines that are exchanged, and how an end or a failure is told."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdserve.bench.listening import Call
from pdserve.bench.policy_runs import Model
from pdserve.bench.speed import child, children
from pdserve.bench.speed.cells import Cell
from pdserve.bench.speed.children import running_child
from pdserve.bench.speed.engines import Engine, EngineFailed, Setting
from pdserve.bench.speed.ours import engine_alone
from pdserve.bench.tiny_model import QUICK, make_model

# A library that prints, answers a token a prompt and step, refuses the token 0, and ends at the token 9.
LIBRARY = """
import os, sys, time
from pdserve.bench.speed.child import serve
class Library:
    def answer(self, prompts, num_tokens):
        print("a library's own words")
        if prompts[0][0] == 0:
            raise RuntimeError("no such token")
        if prompts[0][0] == 9:
            sys.exit("out of memory")
        return [[time.monotonic() for _ in range(num_tokens)] for _ in prompts]
def load():
    print("loading")
    return Library()
serve(load)
"""
COMMAND = [sys.executable, "-c", LIBRARY]


def test_a_batch_is_heard_with_its_arrivals_whatever_the_library_prints(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running_child(COMMAND, log) as running:
        called_s = time.monotonic()
        heard = running.hear_all([Call(3, (1, 2), 4), Call(4, (3, 4), 4)])
    assert [(answer.number, len(answer.arrivals_s)) for answer in heard] == [(3, 4), (4, 4)]
    assert called_s <= heard[0].called_s <= heard[0].arrivals_s[0] <= heard[1].arrivals_s[-1] <= time.monotonic()
    assert "a library's own words" in log.read_text()


def test_a_refusal_is_told_and_the_next_batch_is_answered(tmp_path: Path) -> None:
    with running_child(COMMAND, tmp_path / "log") as running:
        with pytest.raises(EngineFailed, match=r"^no such token$"):
            running.hear_all([Call(0, (0,), 2)])
        assert len(running.hear_all([Call(0, (1,), 2)])[0].arrivals_s) == 2


def test_a_process_that_ends_is_told_with_its_last_words_then_and_later(tmp_path: Path) -> None:
    with running_child(COMMAND, tmp_path / "log") as running:
        for _ in range(2):
            with pytest.raises(EngineFailed, match=r"(?s)ended \(status 1\): .*out of memory"):
                running.hear_all([Call(0, (9,), 2)])


def test_one_that_ends_before_it_is_ready_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(EngineFailed, match=r"ended \(status 3\): it said nothing"),
        running_child([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log"),
    ):
        pass


def test_one_that_says_something_else_is_told(tmp_path: Path) -> None:
    with (
        pytest.raises(EngineFailed, match=r"it said 'hello'"),
        running_child([sys.executable, "-c", "print('hello')"], tmp_path / "log"),
    ):
        pass


def test_one_that_is_silent_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "START_S", 0.1)
    with (
        pytest.raises(EngineFailed, match=r"no answer in 0\.1 s"),
        running_child([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "log"),
    ):
        pass


def test_the_script_runs_where_there_is_no_pdserve(tmp_path: Path) -> None:
    """As another environment's Python runs it: isolated, with a stand-in for ctranslate2 beside the model."""
    (tmp_path / "vocabulary.json").write_text(json.dumps(["a", "b", "c"]))
    (tmp_path / "ctranslate2.py").write_text(
        "class Step:\n    batch_id = 0\n"
        "class Generator:\n"
        "    def __init__(self, model, **settings): assert settings['compute_type'] == 'int8', settings\n"
        "    def generate_batch(self, prompts, min_length, max_length, callback, **more):\n"
        "        assert prompts == [['b', 'c']] and min_length == max_length, prompts\n"
        "        for _ in range(max_length): callback(Step())\n"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-S", child.__file__, "ctranslate2", str(tmp_path), "1", "int8"],
        input=json.dumps({"prompts": [[1, 2]], "num_tokens": 3}) + "\n",
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    ready, answer = map(json.loads, ran.stdout.splitlines())
    assert ready == {"is_ready": True}
    assert [len(arrivals_s) for arrivals_s in answer["arrivals_s"]] == [3]


def test_our_engine_alone_is_measured_in_a_process_of_its_own(tmp_path: Path) -> None:
    cell = Cell("answers", 2, 20, 5)
    model = Model(make_model(tmp_path / "model", QUICK), tuple(range(200)))
    engine: Engine = engine_alone(Setting(model, [cell], tmp_path, tmp_path, num_threads=1), "int8")
    assert engine.title == "engine int8"
    with engine.start() as running:
        assert running.speed(cell, model.text, 0) > 0

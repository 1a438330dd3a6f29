"""What the cells of the table of speeds are made of, and the engine that is measured alone."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pdserve.bench.listening import Heard
from pdserve.bench.policy_runs import Model
from pdserve.bench.speed import arguments, limits, scaling
from pdserve.bench.speed import engine as command
from pdserve.bench.speed.cells import CELLS, QUICK, Cell, NeverTogether
from pdserve.bench.speed.in_process import Engine, Profile
from pdserve.bench.speed.limits import measure_limits
from pdserve.bench.speed.quality import Quality, judge, prose
from pdserve.bench.speed.scaling import Sizes
from pdserve.bench.tiny_model import QUICK as TINY
from pdserve.bench.tiny_model import make_model
from pdserve.commands.bench import main
from pdserve.request import TokenLogprobs

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


def test_answers_that_were_never_written_together_have_no_speed() -> None:
    with pytest.raises(NeverTogether, match="the first of 2 answers had ended"):
        Cell("answers", 2, 8, 2).tokens_per_s([heard(1.0, 2.0), heard(2.0, 3.0)])


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


def test_what_is_read_of_a_text_are_its_tokens_log_probabilities(tiny_engine: Engine) -> None:
    text = list(TEXT)
    entries = tiny_engine.read(text)
    assert [entry.token_id for entry in entries] == text[1:]
    assert all(entry.logprob <= entry.top[0][1] <= 0 for entry in entries)
    assert judge(entries, None).nll == pytest.approx(judge(tiny_engine.read(text), None).nll, rel=1e-6)
    assert judge(entries, None).nll != pytest.approx(judge(tiny_engine.read(text[::-1]), None).nll, rel=1e-3)


def test_quality_is_beside_fp32_where_that_was_measured() -> None:
    exact = [TokenLogprobs(1, -1.0, ((1, -1.0),)), TokenLogprobs(2, -3.0, ((4, -0.5),))]
    rounded = [TokenLogprobs(1, -1.2, ((1, -1.2),)), TokenLogprobs(2, -3.0, ((3, -0.6),))]
    assert judge(rounded, None) == Quality(2.1, pytest.approx(math.exp(2.1)), None, None)
    judged = judge(rounded, exact)
    assert judged.over_fp32 == pytest.approx(math.exp(2.1) / math.exp(2.0) - 1)
    assert judged.agreement == 0.5
    assert (judge(exact, exact).over_fp32, judge(exact, exact).agreement) == (0.0, 1.0)


def test_the_text_is_a_page_of_prose_that_says_nothing_twice() -> None:
    text = prose()
    words = text.split()
    assert 1200 < len(words) < 1500
    runs = Counter(zip(*(words[offset:] for offset in range(6)), strict=False))
    assert max(runs.values()) == 1
    assert text.isascii()


@pytest.fixture
def run(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """The command on a tiny model, with small cells; its figures."""
    monkeypatch.setattr(arguments, "CELLS", (Cell("one", 1, 30, 1), Cell("two", 2, 10, 5)))
    monkeypatch.setattr(arguments, "QUICK", ("one", "two"))
    monkeypatch.setattr(command.Model, "of", lambda directory: model)
    monkeypatch.setattr(command, "prose", lambda: prose()[:600])
    monkeypatch.setattr(limits, "READ_BYTES", 1 << 20)

    def run(*words: str) -> dict[str, Any]:
        file = tmp_path / "figures.json"
        given = ["engine", "--model", str(model.directory), "--repeats", "1", "--threads", "1", "--json", str(file)]
        assert main([*given, *words]) == 0
        figures: dict[str, Any] = json.loads(file.read_text())
        return figures

    return run


def test_the_command_prints_a_table_and_writes_the_figures(
    run: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    figures = run("--quantization", "int8", "fp32")
    exact, rounded = figures["forms"]
    for form, quantization in ((exact, "fp32"), (rounded, "int8")):
        assert form["quantization"] == quantization
        assert [row["cell"] for row in form["rows"]] == ["one", "two"]
        assert all(row["limit"]["share"] > 0 for row in form["rows"])
    assert exact["quality"]["over_fp32"] == 0.0
    assert abs(rounded["quality"]["over_fp32"]) < 0.05
    assert rounded["quality"]["agreement"] > 0.8
    printed = capsys.readouterr().out
    assert "tokens/s" in printed
    assert "GB/s of memory" in printed


def test_where_the_kernel_cannot_be_built_there_are_no_limits_and_the_reason_is_told(
    run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "measure_limits", partial(measure_limits, compiler="no-such-compiler"))
    figures = run("--cells", "one")
    assert figures["limits"] is None
    assert [row["limit"] for row in figures["forms"][0]["rows"]] == [None]
    assert "no limits: no C compiler: 'no-such-compiler' not found" in capsys.readouterr().out


def test_the_command_measures_rounds_by_their_rows_and_context(
    run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "SIZES", Sizes((1, 3), (70, 200), (0, 100), chunk=64, kv_bytes=2 << 20))
    (found,) = run("--scaling", "--quantization", "int4")["scaling"]
    assert found["quantization"] == "int4"
    assert set(found["decode_ms"]) == {"1", "3"}
    assert found["decode_ms"]["3"]["200"] is None
    assert min(found["chunk_ms"].values()) > 0
    assert "a chunk" in capsys.readouterr().out

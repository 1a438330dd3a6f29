"""What is shown and written of results that are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from pdserve.bench.serve.figures import Slo, figures
from pdserve.bench.serve.picture import write_png
from pdserve.bench.serve.report import as_json, as_markdown, print_results, write_markdown
from pdserve.bench.serve.results import Results, Run
from pdserve.errors import StartupError
from tests.bench.serve.fakes import asked, driven, failed, heard

SLO = Slo()
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def results() -> Results:
    """Two repetitions on one server, one on another, none on a third."""
    results = Results.empty(["2 streams", "1 + a prompt of 9"], ["fused int4", "pair", "vllm"])
    quick, slow = asked(heard(0.5, 0.6, 0.7)), asked(heard(1.5, 1.6, 1.7))
    long_prompt = asked(heard(0.9, called_s=0.55))
    runs = {
        "fused int4": [driven(quick), driven(slow, *(failed(f"queue of {n} is full", True) for n in (7, 8)))],
        "pair": [driven(quick, long_prompt=long_prompt)],
    }
    for by_server in results.measured.values():
        for server, found in runs.items():
            by_server[server].runs += [Run(one, figures(one, SLO)) for one in found]
    results.broken["vllm"] = "it did not start"
    return results


def shown(results: Results) -> str:
    console = Console(width=100, highlight=False)
    with console.capture() as capture:
        print_results(results, SLO, console)
    return capture.get()


def test_a_table_has_a_row_a_figure_and_a_column_a_server(results: Results) -> None:
    text = shown(results)
    assert "TTFT within 2 s and a mean gap within 150 ms" in text
    (line,) = [line for line in text.split("2 streams")[1].splitlines() if "TTFT p50, s" in line][:1]
    assert line.split("TTFT p50, s")[1].split() == ["1.00", "(0.50–1.50)", "0.50", "–"]
    assert "worst gap beside it, s" in text
    assert "vllm did not serve to the end: it did not start" in text


def test_reasons_that_differ_in_numbers_alone_are_one(results: Results) -> None:
    assert "2 streams, fused int4: 2 failed: queue of 7 is full" in shown(results)


def test_markdown_has_the_command_and_the_same_cells(results: Results, tmp_path: Path) -> None:
    text = as_markdown(results, SLO, "pdserve bench serve --streams 2")
    lines = text.splitlines()
    assert lines[0] == "`pdserve bench serve --streams 2`"
    assert lines[2].startswith("On ")
    assert lines[2].endswith("every gap within 150 ms.")
    assert "| 2 streams | fused int4 | pair | vllm |" in lines
    assert "| TTFT p50, s | 1.00 (0.50–1.50) | 0.50 | – |" in lines
    assert "- vllm did not serve to the end: it did not start" in lines
    write_markdown(str(tmp_path / "x.md"), text)
    assert (tmp_path / "x.md").read_text() == text
    with pytest.raises(StartupError, match="can't be written"):
        write_markdown(str(tmp_path / "none" / "x.md"), text)


def test_json_has_medians_and_each_repetition(results: Results) -> None:
    found = json.loads(json.dumps(as_json(results, SLO)))
    assert (found["slo_ttft_s"], found["slo_itl_s"], found["broken"]) == (2.0, 0.15, {"vllm": "it did not start"})
    fused = found["loads"]["2 streams"]["fused int4"]
    assert fused["medians"]["ttft_p50_s"] == 1.0
    assert [one["ttft_p50_s"] for one in fused["repeats"]] == [0.5, 1.5]
    assert fused["failures"] == [{"num": 2, "example": "queue of 7 is full"}]
    assert found["loads"]["2 streams"]["vllm"] == {"medians": {}, "repeats": [], "failures": []}


def test_a_run_is_whole_when_every_server_answered_under_each_load(results: Results) -> None:
    assert not results.is_whole
    del results.broken["vllm"]
    assert not results.is_whole
    for by_server in results.measured.values():
        del by_server["vllm"]
    assert results.is_whole


def test_a_picture_is_drawn_of_servers_with_and_without_answers(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "x.png"
    write_png(str(path), results, SLO)
    assert path.read_bytes().startswith(PNG)

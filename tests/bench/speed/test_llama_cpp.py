"""llama.cpp's tools: what they are asked, and what is read from what they print."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pdserve.bench.policy_runs import Model
from pdserve.bench.speed.cells import Cell
from pdserve.bench.speed.engines import WARM_UP_ROOM, EngineFailed, Setting
from pdserve.bench.speed.llama_cpp import batched_speed, bench_speed, run_tool, tools

ONE = '[{"model_type": "llama ?B Q4_1", "n_prompt": 1024, "n_gen": 0, "n_depth": 0, "avg_ts": 485.7, "stddev_ts": 0}]'
MANY = """main: n_kv_max = 1280
{"n_kv_max": 1280, "pp": 64, "tg": 96, "pl": 8, "n_kv": 1280, "speed_pp": 570.2, "speed_tg": 186.5, "t": 5.1}

llama_perf_context_print: load time = 50 ms
"""
# Prints, as the tool would, a figure that only the words expected of it give.
TOOL = """#!{python}
import json, sys
name, words = sys.argv[0].rpartition("/")[2], " ".join(sys.argv[1:])
if name == "llama-bench":
    print(json.dumps([{{"avg_ts": len(words), "words": words}}]))
else:
    print(json.dumps({{"speed_tg": len(words)}}))
"""


def test_figures_are_read_from_what_the_tools_print() -> None:
    assert bench_speed(ONE) == 485.7
    assert batched_speed(MANY) == 186.5


def test_a_cell_that_the_tool_left_out_is_told() -> None:
    with pytest.raises(EngineFailed, match="left it out"):
        batched_speed("main: n_kv_max = 64\n")


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (Cell("prompt", 1, 1024, 1), "-p 1024 -n 0 -r 1 -o json"),
        (Cell("alone", 1, 64, 96), "-p 0 -n 96 -d 64 -r 1 -o json"),
        (Cell("eight", 8, 64, 96), "-npp 64 -ntg 96 -npl 8 -c 1280 --output-format jsonl"),
    ],
)
def test_each_cell_asks_its_tool_for_its_sizes(cell: Cell, words: str, tmp_path: Path) -> None:
    binaries = tmp_path / "llama.cpp" / "build" / "bin"
    binaries.mkdir(parents=True)
    for name in ("llama-bench", "llama-batched-bench"):
        (binaries / name).write_text(TOOL.format(python=sys.executable))
        (binaries / name).chmod(0o755)
    setting = Setting(Model(tmp_path, (1, 2, 3)), [cell], tmp_path, tmp_path, num_threads=2)
    with tools(setting).start() as running:
        speed = running.speed(cell, (1, 2, 3), 0)
    assert speed == len(f"-m {tmp_path / 'llama.cpp' / 'model.gguf'} -t 2 {words}")


def test_a_tool_that_fails_is_told_with_its_last_word() -> None:
    with pytest.raises(EngineFailed, match="ended with 1: no such model"):
        run_tool([sys.executable, "-c", "import sys; sys.exit('loading\\nno such model')"])


def test_a_slot_has_room_for_its_cells_and_for_what_warms_up(tmp_path: Path) -> None:
    cells = [Cell("a", 1, 4096, 32), Cell("b", 8, 64, 96), Cell("c", 1, 7168, 32)]
    setting = Setting(Model(tmp_path, (1,)), cells, tmp_path, tmp_path, num_threads=1)
    assert setting.stream_tokens(1) == 7200
    assert setting.stream_tokens(8) == WARM_UP_ROOM

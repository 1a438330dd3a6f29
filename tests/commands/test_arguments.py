"""What is wrong with the arguments of a command is told at once, all of it, and before anything slow or lasting."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdserve import cli
from pdserve.bench.fidelity.command import LOAD_NAMES
from pdserve.bench.peers.command import vllm_environment
from pdserve.commands.arguments import kept_directory, parsed, picture, read_file, real, whole, written_file
from pdserve.errors import StartupError
from pdserve.faults import Fault

NO_FOLDER = "/nonexistent/x.json"
# Words of a command, and how each of its faults begins.
WRONG = {
    "bench chaos": (
        ["--requests", "x", "--faults", "0", "--seed", "-1", "--ucx-tls", "nonsense", "--keep", "/proc/nope"],
        ["--requests x: ", "--faults 0: ", "--seed -1: ", "--ucx-tls nonsense: ", "--keep /proc/nope: "],
    ),
    "bench peers": (
        ["--vllm-env", "/nonexistent", "--repeats", "0", "--lengths", "5", "9000", "--streams", "x", "--only", "y"],
        ["--vllm-env /nonexistent: ", "--repeats 0: ", "--lengths 9000: ", "--streams x: ", "--only y: "],
    ),
    "bench interference": (
        ["--costs", "nope", "--repeats", "0", "--png", "/nonexistent/x.png", "--chunk", "900"],
        ["--costs nope: ", "--repeats 0: ", "--png /nonexistent/x.png: ", "--num-chunks 58: "],
    ),
    "bench fidelity": (
        ["--costs", "nope", "--only", "x", "--repeats", "1", "--seconds", "0"],
        ["--costs nope: ", "--only x: ", "--repeats 1: ", "--seconds 0: "],
    ),
    "bench flags": (
        ["--costs", "nope", "--load", "0", "--workload", "x", "--requests", "0", "--max-num-seqs", "y"],
        ["--costs nope: ", "--load 0: ", "--workload x: ", "--requests 0: ", "--max-num-seqs y: "],
    ),
    "simulate poisson": (
        ["--rate", "0", "--requests", "x", "--prompt-tokens", "y", "--slo-ttft-ms", "0", "--max-num-seqs", "z"],
        ["--rate 0: ", "--requests x: ", "--prompt-tokens y: ", "--slo-ttft-ms 0: ", "--max-num-seqs z: "],
    ),
    "simulate closed": (["--users", "0", "--think-s", "-1"], ["--users 0: ", "--think-s -1: "]),
    "simulate trace": (["--limit", "0", "--file", "/nonexistent"], ["--limit 0: ", "--file /nonexistent: "]),
    "simulate interference": (["--attack-s", "-1", "--costs", "nope"], ["--attack-s -1: ", "--costs nope: "]),
    "simulate tune": (
        ["--goal", "goodput", "--itl-p99-ms", "4", "--load", "11", "--max-ranks", "8"],
        ["--goal goodput: needs an SLO", "--itl-p99-ms 4: ", "--load 11: ", "--max-ranks 8: "],
    ),
    "simulate gate": (["--users-of-rank", "0", "--think-s", "x"], ["--users-of-rank 0: ", "--think-s x: "]),
    "generate hi": (["--target", "foo", "--top-k", "x"], ["--target foo: must be HOST:PORT", "--top-k x: "]),
    "status": (["--target", "foo", "--watch", "0"], ["--target foo: must be HOST:PORT", "--watch 0: "]),
}
MODULES = (
    *(f"pdserve.bench.{name}.command" for name in ("chaos", "peers", "interference", "fidelity", "flags")),
    "pdserve.bench.calibrate",
    *(f"pdserve.commands.simulate.{name}" for name in ("loads", "replay", "pair", "gate", "tune")),
)
SLOW = ("torch", "numpy", "safetensors", "huggingface_hub", "matplotlib", "nixl_cu12")


@pytest.mark.parametrize("command", WRONG)
def test_every_wrong_argument_is_told_at_once(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, begins = WRONG[command]
    assert cli.main([*command.split(), *words, "--json", NO_FOLDER]) == 2
    shown = capsys.readouterr().err
    assert f"{len(begins) + 1} settings are wrong" in shown
    missing = [
        begin for begin in (*begins, f"--json {NO_FOLDER}: there is no directory") if f"\n  {begin}" not in shown
    ]
    assert missing == [], shown


def test_arguments_are_checked_before_what_is_slow_is_imported() -> None:
    program = f"import importlib, sys; [importlib.import_module(name) for name in {MODULES}];"
    program += f"print([name for name in {SLOW} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout == "[]\n"


def test_a_calibration_s_file_is_tried_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["simulate", "--calibrate", NO_FOLDER]) == 2
    assert "there is no directory /nonexistent" in capsys.readouterr().err


def test_loads_that_may_be_asked_are_those_there_are() -> None:
    from pdserve.bench.fidelity.loads import LOADS

    assert tuple(load.name for load in LOADS) == LOAD_NAMES


# ---------------------------------------------------------------- types


@pytest.mark.parametrize(("text", "value"), [("3", 3), ("0", None), ("7", None), ("1.5", None), ("x", None)])
def test_a_whole_number_is_within_its_range(text: str, value: int | None) -> None:
    found = whole("--n", 1, 6)(text)
    assert found == value if value is not None else isinstance(found, Fault)


@pytest.mark.parametrize(("text", "value"), [("0.5", 0.5), ("0", None), ("2", None), ("nan", None), ("inf", None)])
def test_a_number_is_finite_and_within_its_range(text: str, value: float | None) -> None:
    found = real("--x", above=0, most=1)(text)
    assert found == value if value is not None else isinstance(found, Fault)


@pytest.mark.parametrize("path", ["", "no/file", "/proc/nope"])
def test_a_path_that_can_not_be_written_is_refused(path: str, tmp_path: Path) -> None:
    assert isinstance(written_file("--json")(str(tmp_path / path)), Fault)


def test_trying_a_path_leaves_nothing_behind_and_changes_nothing(tmp_path: Path) -> None:
    fresh, old = tmp_path / "fresh.json", tmp_path / "old.json"
    old.write_text("kept")
    assert written_file("--json")(str(fresh)) == str(fresh)
    assert written_file("--json")(str(old)) == str(old)
    assert kept_directory("--keep")(str(tmp_path / "a" / "b")) == str(tmp_path / "a" / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["old.json"]
    assert old.read_text() == "kept"


@pytest.mark.parametrize("below", ["", "/below"])
def test_a_file_is_no_directory_to_keep_things_in(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert isinstance(kept_directory("--keep")(f"{tmp_path}/file{below}"), Fault)


def test_standard_output_is_for_json_only() -> None:
    assert written_file("--json", may_be_output=True)("-") == "-"
    assert isinstance(written_file("--png")("-"), Fault)


def test_a_picture_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert picture("--png")(str(tmp_path / "x.png")) == str(tmp_path / "x.png")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert 'pip install "pdserve[bench]"' in str(picture("--png")(str(tmp_path / "x.png")))


def test_a_file_to_read_is_opened(tmp_path: Path) -> None:
    assert read_file("--file")(__file__) == __file__
    assert isinstance(read_file("--file")(str(tmp_path)), Fault)


def test_an_error_that_names_its_flag_does_so_once() -> None:
    def parse(text: str) -> str:
        raise StartupError(f"--x {text}: is wrong; give another")

    assert str(parsed("--x", parse)("7")) == "--x 7: is wrong; give another"


def test_an_environment_without_vllm_is_refused(tmp_path: Path) -> None:
    check = vllm_environment("--vllm-env")
    assert "is no virtual environment" in str(check(str(tmp_path)))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    assert "without vLLM" in str(check(str(tmp_path)))
    package = tmp_path / "lib" / "python3.12" / "site-packages" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    assert check(str(tmp_path)) == str(tmp_path)

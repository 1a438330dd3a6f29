"""What is wrong with the arguments is told at once, and nothing slow is imported for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.bench.serve import command
from pdserve.faults import ConfigError

SLOW = ("torch", "numpy", "safetensors", "huggingface_hub", "matplotlib", "nixl_cu12")


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as told:
        command.main(list(words))
    return str(told.value)


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        (["--servers", "fused", "tgi"], "--servers tgi: give one of fused, pair, vllm-fp32, vllm-bf16, llama-server"),
        (["--quantization", "int3"], "--quantization int3: "),
        (["--set", "speed=9"], "--set speed=9: give FIELD=VALUE of a flag"),
        (["--set", "port=9"], "--set port=9: give FIELD=VALUE of a flag"),
        (["--set", "max_num_seqs=many"], "--set max_num_seqs=many: "),
        (["--streams", "0"], "--streams 0: "),
        (["--rate", "0"], "--rate 0: "),
        (["--trace", "/nonexistent"], "--trace /nonexistent: can't be read"),
        (["--prompt-tokens", "some"], "--prompt-tokens some: "),
        (["--address", "here"], "--address here: must be HOST:PORT"),
        (["--address", "127.0.0.1:1", "--servers", "fused"], "--servers fused: is of servers to start"),
        (["--rate", "1", "--long-prompt", "100"], "--long-prompt 100: arrives beside streams"),
        (["--streams", "2", "8", "--requests", "7"], "--requests 7: can't keep 8 streams busy"),
        (["--requests", "31"], "--requests 31: can't keep 32 streams busy"),
        (["--json", "/nonexistent/x.json"], "--json /nonexistent/x.json: there is no directory"),
    ],
)
def test_a_wrong_argument_is_told(words: list[str], begins: str) -> None:
    assert refused(*words).startswith(begins)


@pytest.mark.parametrize("name", ["vllm-fp32", "llama-server"])
def test_a_server_that_is_not_installed_is_told_with_what_installs_it(name: str, tmp_path: Path) -> None:
    told = refused("--servers", "fused", name, "--peers", str(tmp_path))
    assert told.startswith(f"--servers {name}: isn't in {tmp_path}; ")
    assert "`make bench-speed` installs it" in told


def test_a_server_of_one_model_serves_no_other(tmp_path: Path) -> None:
    binaries = tmp_path / "llama.cpp" / "build" / "bin"
    binaries.mkdir(parents=True)
    (binaries / "llama-server").touch()
    (tmp_path / "llama.cpp" / "model.gguf").touch()
    told = refused("--servers", "llama-server", "--peers", str(tmp_path), "--model", "other")
    assert told.startswith("--model other: is not what llama-server serves")


def test_a_setting_is_read_as_the_node_reads_it() -> None:
    assert command.parse_setting("decode_interleave_every=8") == ("decode_interleave_every", 8)
    assert command.parse_setting("kv_checksum=true") == ("kv_checksum", True)


def test_help_says_what_goodput_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    shown = capsys.readouterr().out
    assert "strict goodput asks that of every gap" in shown
    assert "PSS" in shown


def test_arguments_are_checked_before_what_is_slow_is_imported() -> None:
    program = "import sys, pdserve.bench.serve.command;"
    program += f"print([name for name in {SLOW} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    assert ran.stdout == "[]\n"

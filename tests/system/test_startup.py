"""What a node says when it cannot start: one line with the remedy, exit status 2, no traceback."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pdserve.config import MODULES, Role
from pdserve.config.ports import free_port

pytestmark = pytest.mark.system


def refused(*words: str, role: Role = Role.FUSED) -> list[str]:
    """What a node that cannot start says, less its progress: it begins with the node's name."""
    ran = subprocess.run(
        [sys.executable, "-m", MODULES[role], *words], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 2, ran.stderr
    assert ran.stdout == ""
    assert "Traceback" not in ran.stderr
    lines = ran.stderr.splitlines()
    (first,) = [number for number, line in enumerate(lines) if line.startswith(f"{role} node: ")]
    return lines[first:]


def test_a_port_in_use_is_told_before_the_model_is_loaded() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        (line,) = refused("no-such-model", "--port", str(port))
    assert f"127.0.0.1:{port}: Address already in use; choose others with --host and --port" in line


def test_a_model_that_does_not_exist_is_told_with_what_could_be_given() -> None:
    (line,) = refused("no-such-model", "--port", str(free_port()))
    assert "no model 'no-such-model': give a directory, a hub id org/name, or one of smollm2" in line


def test_an_architecture_that_is_not_supported_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MambaForCausalLM"]}))
    (line,) = refused(str(tmp_path), "--port", str(free_port()))
    assert "MambaForCausalLM" in line
    assert "LlamaForCausalLM" in line


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("--num-kv-blocks", str(10**9), "blocks would fit"),
        ("--kv-memory-fraction", "1e-9", "raise --kv-memory-fraction"),
    ],
)
def test_too_little_memory_is_told_with_the_knob(tiny_model: Path, flag: str, value: str, told: str) -> None:
    (line,) = refused(str(tiny_model), "--port", str(free_port()), flag, value)
    assert "GiB" in line
    assert told in line


def test_all_wrong_flags_are_told_at_once() -> None:
    lines = refused(
        "smollm2", "--port", "70000", "--max-num-seqs", "0", "--speed=9", "--kv-lease-s", "3", role=Role.DECODE
    )
    assert lines[0] == "decode node: 4 settings are wrong:"
    for flag in ("--port 70000", "--max-num-seqs 0", "--speed", "--kv-lease-s 3"):
        assert sum(line.strip().startswith(flag) for line in lines[1:]) == 1, lines
    assert len(lines) == 5

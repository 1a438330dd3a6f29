import os
import sys
from pathlib import Path

import pytest

from pdserve import cli
from pdserve.commands import pull, serve


def test_serve_becomes_the_role_s_program_with_the_same_words(monkeypatch: pytest.MonkeyPatch) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, words: became.append(words))
    words = ["m", "--role", "decode", "--prefill-peers", "127.0.0.1:1"]
    serve.main(words)
    assert became == [[sys.executable, "-X", "pdserve", "-m", "decode_node", *words]]


def test_serve_tells_all_faults_before_it_becomes_anything(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "m", "--port", "x", "--kv-lease-s", "1"]) == 2
    assert "2 settings are wrong" in capsys.readouterr().err


def test_pull_prints_where_the_model_lies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull.hub, "pull", lambda name, progress: tmp_path / name)
    assert cli.main(["pull", "smollm2"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'smollm2'}\n"

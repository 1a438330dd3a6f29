import subprocess
import sys

import pytest

from pdserve import cli


def test_without_a_command_the_commands_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in cli.COMMANDS)


def test_an_unknown_command_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sreve"]) == 2
    assert "there is no command sreve" in capsys.readouterr().err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_with_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main([name, "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: pdserve {name}")
    assert "example:\n  pdserve" in shown


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_wrong_flag_is_one_line_and_status_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name, "x", "--such-a-flag"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(f"pdserve {name}: ")
    assert "Traceback" not in shown


def test_client_commands_start_without_what_nodes_need() -> None:
    program = (
        "import sys; from pdserve.cli import main;"
        "main(['generate', 'x', '--target', '127.0.0.1:1', '--timeout-s', '0']);"
        "main(['status', '--target', '127.0.0.1:1', '--json', '/dev/null', '--watch', '0']);"
        "print([name for name in ('torch', 'pydantic', 'msgspec', 'zmq', 'yaml', 'rich') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert ran.stdout == "[]\n"


@pytest.mark.parametrize("name", ["bench", "simulate", "generate"])
def test_ctrl_c_is_one_line_and_status_130(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(words: list[str]) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"{cli.COMMANDS[name].module}.main", interrupted)
    assert cli.main([name]) == 130
    assert capsys.readouterr().err == f"pdserve {name}: interrupted\n"

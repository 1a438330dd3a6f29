import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pdserve import node_process
from pdserve.commands import up
from pdserve.config import Role, ServerArgs
from pdserve.errors import StartupError

STUB = """
import os, pathlib, signal, sys, time
name = sys.argv[1]
if name == "dies":
    print("said before it died")
    sys.exit(7)
signal.signal(signal.SIGTERM, signal.SIG_IGN if name == "stays" else signal.SIG_DFL)
started = pathlib.Path(name + ".starting")
started.write_text(str(os.getpid()))
started.rename(name + ".started")
time.sleep(600)
"""


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Children run a program that stands in for a node; the model's name says how it behaves."""
    (tmp_path / "stub_node.py").write_text(STUB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(node_process, "MODULES", dict.fromkeys(Role, "stub_node"))
    monkeypatch.setattr(node_process, "ENDING_S", 0.2)
    return tmp_path


def start(name: str) -> node_process.NodeProcess:
    return node_process.NodeProcess(ServerArgs(model=name, port=1, drain_timeout_s=0.1))


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        os.sched_yield()


def test_a_node_that_ends_while_starting_is_told_with_its_status(stub: Path) -> None:
    node = start("dies")
    with pytest.raises(StartupError, match=r"the fused node on 127\.0\.0\.1:1 ended while starting \(status 7\)"):
        node_process.wait_until_ready([node], lambda node: None)
    node.end()


def test_a_node_that_takes_too_long_is_told_with_the_knob(stub: Path) -> None:
    node = start("works")
    node.args.startup_timeout_s = 0.0
    with pytest.raises(StartupError, match="raise --startup-timeout-s"):
        node_process.wait_until_ready([node], lambda node: None)
    node.end()
    assert node.has_ended


@pytest.mark.parametrize(("name", "status"), [("works", -signal.SIGTERM), ("stays", -signal.SIGKILL)])
def test_a_node_is_ended_whatever_it_does_with_the_signal(stub: Path, name: str, status: int) -> None:
    node = start(name)
    wait_for(stub / f"{name}.started")
    node.end()
    assert node.exit_status == status
    node.end()


def test_a_node_ends_when_its_parent_is_killed(stub: Path) -> None:
    program = (
        "import time; from pdserve import node_process; from pdserve.config import Role, ServerArgs;"
        "node_process.MODULES = dict.fromkeys(Role, 'stub_node');"
        "node_process.NodeProcess(ServerArgs(model='works', port=1)); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program])
    wait_for(stub / "works.started")
    child = int((stub / "works.started").read_text())
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 20
    while is_running(child):
        assert time.monotonic() < deadline
        os.sched_yield()


def is_running(pid: int) -> bool:
    """A zombie that its new parent hasn't buried yet has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_node_stays_on_its_cores(stub: Path) -> None:
    core = max(os.sched_getaffinity(0))
    node = node_process.NodeProcess(ServerArgs(model="works", port=1, drain_timeout_s=0.1), cores=[core])
    wait_for(stub / "works.started")
    assert os.sched_getaffinity(node.pid) == {core}
    node.end()


def test_when_one_node_dies_the_other_is_ended_and_the_dead_one_named(
    stub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dying, other = start("dies"), start("works")
    assert up.supervise(dying, other) == 1
    assert other.has_ended
    assert "ended by itself (status 7); ending the" in capsys.readouterr().err


def test_a_signal_is_forwarded_and_both_nodes_end(stub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = start("works"), start("works")
    wait_for(stub / "works.started")
    waits = iter([lambda s: signal.raise_signal(signal.SIGTERM)])
    real_sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda s: next(waits, real_sleep)(s))
    assert up.supervise(prefill, decode) == 130
    assert prefill.has_ended
    assert decode.has_ended


def test_sigterm_leaves_a_block_as_ctrl_c_does() -> None:
    with pytest.raises(KeyboardInterrupt), node_process.interrupted_by_sigterm():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_children_get_no_setting_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_PORT", "1")
    assert "PDSERVE_PORT" not in node_process.without_settings()


SIGTERM_IN_A_LOOP = """
import asyncio, os, signal, sys
from pdserve.node_process import interrupted_by_sigterm
if sys.argv[1] == "ignored":
    signal.signal(signal.SIGINT, signal.SIG_IGN)

async def main():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.Event().wait()
    finally:
        await asyncio.sleep(0)
        print("ended in order")

with interrupted_by_sigterm():
    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize("sigint", ["heeded", "ignored"])
def test_sigterm_leaves_an_event_loop_in_order(sigint: str) -> None:
    command = [sys.executable, "-c", SIGTERM_IN_A_LOOP, sigint]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "ended in order\ninterrupted\n"
    assert sigint == "ignored" or ran.stderr == ""


def test_a_node_s_process_is_found_by_the_name_of_the_project(stub: Path) -> None:
    node = start("works")
    wait_for(stub / "works.started")
    words = Path(f"/proc/{node.pid}/cmdline").read_text().split("\0")
    assert words[1:5] == ["-X", "pdserve", "-m", "stub_node"]
    node.end()

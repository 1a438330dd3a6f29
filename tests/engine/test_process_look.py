"""A process looked at from outside: stopped or not, and whether it computes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from pdserve.engine.process_look import ProcessLook, look_at
from tests.engine.other_end import wait_for

BUSY = "while True: pass"


def look(child: subprocess.Popen[bytes]) -> ProcessLook:
    found = look_at(child.pid)
    assert found is not None
    return found


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", BUSY]) as process:
        yield process
        process.kill()


def test_the_time_a_process_computed_grows_while_it_computes(child: subprocess.Popen[bytes]) -> None:
    before = look(child)
    wait_for(lambda: look(child).cpu_s > before.cpu_s or None)
    assert not look(child).is_stopped


def test_a_stopped_process_is_seen_to_be_stopped_until_it_goes_on(child: subprocess.Popen[bytes]) -> None:
    os.kill(child.pid, signal.SIGSTOP)
    wait_for(lambda: look(child).is_stopped or None)
    os.kill(child.pid, signal.SIGCONT)
    wait_for(lambda: not look(child).is_stopped or None)


def test_of_a_process_that_is_gone_nothing_is_seen(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    assert look_at(child.pid) is None


def test_a_process_that_nobody_waited_for_yet_is_seen_to_have_ended(child: subprocess.Popen[bytes]) -> None:
    assert not look(child).has_ended
    child.kill()
    wait_for(lambda: look(child).has_ended or None)

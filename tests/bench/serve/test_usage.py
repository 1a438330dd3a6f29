"""What child processes cost while they are watched."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pdserve.bench.serve.usage import Usage, pss_bytes

MIB = 2**20
# Keeps 64 MiB, takes 0.3 s of a core once it is told to, says so, and waits for its end.
CHILD = """
import sys, time
kept = bytearray(64 * 2**20)
print("up", flush=True)
sys.stdin.readline()
while time.process_time() < BURN_S: pass
print("done", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def child():
    program = CHILD.replace("BURN_S", "0.4")
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_cpu_and_memory_are_those_of_the_processes_that_were_started(child) -> None:
    with Usage() as usage:
        child.stdin.write("go\n")
        child.stdin.flush()
        assert child.stdout.readline() == "done\n"
    assert usage.cpu_s >= 0.2
    assert usage.peak_bytes >= 64 * MIB


def test_a_process_that_has_ended_takes_no_memory(child) -> None:
    assert pss_bytes(child.pid) >= 64 * MIB
    child.kill()
    child.wait(20)
    assert pss_bytes(child.pid) == 0

"""Ports that nodes are given stay free until they listen there."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from pdserve.config import ports
from pdserve.config.ports import HANDED_OUT, free_port


def listen(stack: ExitStack, port: int) -> int:
    listener = stack.enter_context(socket.socket())
    listener.bind(("127.0.0.1", port))
    listener.listen()
    bound: int = listener.getsockname()[1]
    return bound


def test_a_port_is_free_and_not_among_those_that_the_kernel_hands_out() -> None:
    lowest_handed_out = int(HANDED_OUT.read_text().split()[0])
    with ExitStack() as stack:
        found = [free_port() for _ in range(50)]
        assert max(found) < lowest_handed_out
        for port in set(found):
            assert listen(stack, port) == port


def test_a_port_that_somebody_listens_on_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with ExitStack() as stack:
        taken = listen(stack, free_port())
        free = free_port()
        monkeypatch.setattr(ports, "_candidates", lambda: [taken, free])
        assert free_port() == free
        monkeypatch.setattr(ports, "_candidates", lambda: [taken])
        with pytest.raises(OSError, match=r"no port of 127\.0\.0\.1 is free"):
            free_port()


def test_where_the_kernel_does_not_tell_what_it_hands_out_it_chooses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ports, "HANDED_OUT", tmp_path / "missing")
    with ExitStack() as stack:
        port = free_port()
        assert listen(stack, port) == port

"""A node's port is its own from the first moment, and free for its server."""

from __future__ import annotations

import socket

import pytest

from pdserve.config import ServerArgs
from pdserve.config.ports import free_port
from pdserve.errors import StartupError
from pdserve.node.serve import _held_port


def bind(port: int, *, reuses: bool) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses)
        other.bind(("127.0.0.1", port))
        other.listen()


def test_a_held_port_is_given_to_nobody_but_a_server_that_asks_for_it() -> None:
    port = free_port()
    with _held_port(ServerArgs(model="m", port=port)):
        with pytest.raises(OSError, match="in use"):
            bind(port, reuses=False)
        bind(port, reuses=True)
    bind(port, reuses=False)


def test_a_port_that_somebody_listens_on_is_told_with_the_flags() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        args = ServerArgs(model="m", port=holder.getsockname()[1])
        with pytest.raises(StartupError, match="choose others with --host and --port"), _held_port(args):
            pass

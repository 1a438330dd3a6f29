"""A partition of the way that KV takes, while control goes on: the kernel drops what reaches a rank's sockets."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pdserve.errors import InternalError

# linux/socket.h; asm-generic/unistd.h; linux/filter.h
SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
SYS_PIDFD_GETFD = 438
RETURN_CONSTANT = 0x06
INODE_COLUMN = 9


@contextmanager
def data_channel_cut(*rank_pids: int) -> Iterator[None]:
    """Nothing arrives at any TCP socket these processes have now, listeners too, as long as the block lasts.

    A rank speaks with its front over ipc, so that its TCP sockets are the transport's own. Packets are dropped and not
    refused, as by a switch that died: neither side is told. Raises InternalError where there is no such socket.
    """
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", RETURN_CONSTANT, 0, 0, 0))
    program = struct.pack("HP", 1, ctypes.addressof(drop_all))
    with ExitStack() as stack:
        sockets = [stack.enter_context(one) for pid in rank_pids for one in _tcp_sockets_of(pid)]
        if not sockets:
            raise InternalError(f"processes {rank_pids} have no TCP socket: KV does not travel over tcp")
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, SO_ATTACH_FILTER, program)
        try:
            yield
        finally:
            for one in sockets:
                one.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)


def _tcp_sockets_of(pid: int) -> Iterator[socket.socket]:
    """Our own handles of the process's sockets."""
    inodes = {
        line.split()[INODE_COLUMN]
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
    }
    process = os.pidfd_open(pid)
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(link).removeprefix("socket:[").removesuffix("]") in inodes:
                yield socket.socket(fileno=_copied(process, int(link.name)))
    finally:
        os.close(process)


def _copied(process: int, fd: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    copied = int(libc.syscall(SYS_PIDFD_GETFD, process, fd, 0))
    if copied < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return copied

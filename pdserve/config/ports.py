"""Ports that a node can be given, and given again when it comes back."""

from __future__ import annotations

import random
import socket
from pathlib import Path

# ip(7): `ip_local_port_range`, of which the kernel takes a port for each connection and for whoever asks for any.
HANDED_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")
NUM_TO_CHOOSE_FROM = 16_384
LOWEST = 1_024


def free_port(host: str = "127.0.0.1") -> int:
    """A port of `host` that nobody listens on now, below those that the kernel hands out.

    So it stays free until the node that gets it listens, and while that node is down.
    """
    for port in _candidates():
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            found: int = probe.getsockname()[1]
            return found
    raise OSError(f"no port of {host} is free")


def _candidates() -> list[int]:
    """In random order, as others choose too; 0, which is the kernel's choice, is the last."""
    try:
        lowest_handed_out = int(HANDED_OUT.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return [0]
    ours = range(max(LOWEST, lowest_handed_out - NUM_TO_CHOOSE_FROM), lowest_handed_out)
    return [*random.sample(ours, len(ours)), 0]

"""What the kernel says of processes on this machine (proc(5))."""

from __future__ import annotations

import os
from pathlib import Path


def children(pid: int) -> list[int]:
    """Its living child processes; none if it has ended."""
    try:
        words = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(word) for word in words if is_running(int(word))]


def with_descendants(pid: int) -> list[int]:
    """It, its child processes, and theirs."""
    return [pid, *(other for child in children(pid) for other in with_descendants(child))]


def is_running(pid: int) -> bool:
    """A zombie that nobody has buried yet has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def resident_bytes(pid: int) -> int:
    """Memory of its own that it has touched: files it maps, such as libraries, are left out."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) * 1024


def cpu_s(pid: int) -> float:
    """Seconds of a core that all of its threads have taken; 0 if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def num_open_files(pid: int) -> int:
    """Its file descriptors; 0 if it has ended."""
    try:
        return len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except (FileNotFoundError, ProcessLookupError):
        return 0

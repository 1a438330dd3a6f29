"""A look at a process from outside: stopped, ended, and how much its first thread has computed (proc(5))."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

STATE, USER_TICKS, SYSTEM_TICKS = 0, 11, 12  # fields of `stat` after the name
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class ProcessLook:
    """is_stopped: by a signal, until another lets it go on. cpu_s: of its first thread, since its start.

    has_ended: its parent has not been told yet.
    """

    is_stopped: bool
    cpu_s: float
    has_ended: bool = False


def look_at(pid: int) -> ProcessLook | None:
    """None where there is no such process, or nothing can be seen of it."""
    try:
        stat = Path(f"/proc/{pid}/task/{pid}/stat").read_text()
        words = stat.rpartition(")")[2].split()
        ticks = int(words[USER_TICKS]) + int(words[SYSTEM_TICKS])
    except (OSError, ValueError, IndexError):
        return None
    return ProcessLook(words[STATE] in "Tt", ticks / TICKS_PER_S, words[STATE] in "ZX")

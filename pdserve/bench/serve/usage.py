"""What the processes of a server cost while they are under load."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Self

from pdserve.bench.processes import cpu_s, with_descendants

SAMPLE_S = 1.0
KIB = 1024


class Usage:
    """Of all processes that this one has started, and theirs, while the block runs: one server at a time.

    cpu_s: seconds of a core. peak_bytes: the largest of their proportional set sizes (PSS: pages that several share are
    shared out among them) together, looked at once a second; VmHWM would count a library once a process.
    """

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self.peak_bytes = 0
        self._before_s: dict[int, float] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Self:
        self._before_s = {pid: cpu_s(pid) for pid in _started()}
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join()
        self.cpu_s = sum(cpu_s(pid) - self._before_s.get(pid, 0.0) for pid in _started())

    def _sample(self) -> None:
        """At least once, and once more at the end."""
        is_over = False
        while not is_over:
            is_over = self._is_over.wait(SAMPLE_S)
            self.peak_bytes = max(self.peak_bytes, sum(pss_bytes(pid) for pid in _started()))


def pss_bytes(pid: int) -> int:
    """Resident memory, with a page that n processes map counted as an n-th of one; 0 if it has ended (proc(5))."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith("Pss:"))


def _started() -> list[int]:
    return with_descendants(os.getpid())[1:]

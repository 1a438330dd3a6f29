"""What copies of KV blocks cost in this process: to host memory, and from files."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from pdserve.sim.costs import TierCosts

NUM_BLOCKS = 24
NUM_REPEATS = 5


def measure_tiers(block_bytes: int) -> TierCosts:
    """Copies of blocks one by one; files read one by one, from the page cache where the system keeps them there."""
    blocks = np.ones((NUM_BLOCKS, block_bytes), np.uint8)
    others = np.zeros_like(blocks)
    copy_s = _median_s(lambda: np.copyto(others, blocks))
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(number) for number in range(NUM_BLOCKS)]
        for path, block in zip(paths, blocks, strict=True):
            path.write_bytes(block.tobytes())
        read_s = _median_s(lambda: _read(paths, others))
        open_s = _median_s(lambda: _open(paths))
    num_bytes = blocks.nbytes
    return TierCosts(num_bytes / copy_s, num_bytes / max(read_s - open_s, 1e-9), open_s / NUM_BLOCKS)


def _median_s(run: Callable[[], None]) -> float:
    """After one run that does not count."""
    times_s = []
    for _ in range(NUM_REPEATS + 1):
        started_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - started_s)
    return statistics.median(times_s[1:])


def _read(paths: list[Path], into: np.typing.NDArray[np.uint8]) -> None:
    for path, block in zip(paths, into, strict=True):
        with path.open("rb", buffering=0) as file:
            file.readinto(block)


def _open(paths: list[Path]) -> None:
    for path in paths:
        os.close(os.open(path, os.O_RDONLY))

"""Nodes that share a directory of block files, here and in other processes; a block's number says what it holds.

As a program it stores blocks and prints the number of each that is stored: `files.py DIRECTORY FIRST LAST MAX_BYTES`.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pdserve.kv.layout import Fingerprint
from pdserve.request import BlockHash, BlockId
from pdserve.transfer.file_tier import HEADER_BYTES, FileTier
from pdserve.transfer.loopback import Slab

FINGERPRINT = Fingerprint(1, "llama", "weights-1", "float32", 64, 2, 2, 16, 1000)
BLOCK_BYTES = 24 * 1024
FILE_BYTES = HEADER_BYTES + BLOCK_BYTES
NUM_BLOCKS = 4
UNTOUCHED = 0xEE


def hash_of(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(f"block {number}".encode()).digest())


def payload(number: int) -> bytes:
    return np.random.default_rng(number).bytes(BLOCK_BYTES)


@dataclass
class FileNode:
    """A file tier over a slab of its own."""

    directory: Path
    slab: Slab
    tier: FileTier

    def put(self, number: int) -> bool:
        self.slab[0] = np.frombuffer(payload(number), np.uint8)
        return self.tier.store(hash_of(number), BlockId(0))

    def get(self, number: int) -> bytes | None:
        """What a load brought, None for a miss. The blocks beside it stay as they were."""
        self.slab[:] = UNTOUCHED
        is_hit = self.tier.load(hash_of(number), BlockId(2))
        assert (self.slab[[0, 1, 3]] == UNTOUCHED).all()
        return self.slab[2].tobytes() if is_hit else None

    def path(self, number: int) -> Path:
        """Of the block's file, wherever the fingerprint puts it; there has to be one."""
        return next(self.directory.glob(f"*/*/*/{hash_of(number).hex()}.kv"))

    def tend_all(self) -> None:
        while self.tier.tend():
            pass


def open_node(
    directory: Path,
    *,
    fingerprint: Fingerprint = FINGERPRINT,
    max_bytes: int = 1 << 30,
    block_bytes: int = BLOCK_BYTES,
    scan_every_s: float = 60.0,
) -> FileNode:
    slab = np.zeros((NUM_BLOCKS, block_bytes), np.uint8)
    tier = FileTier(
        directory,
        fingerprint,
        slab_ptr=slab.ctypes.data,
        num_blocks=NUM_BLOCKS,
        block_bytes=block_bytes,
        max_bytes=max_bytes,
        scan_every_s=scan_every_s,
    )
    return FileNode(directory, slab, tier)


def block_files(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.kv"))


def temporaries(directory: Path) -> list[Path]:
    return sorted(directory.rglob("*.tmp"))


def num_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in block_files(directory) + temporaries(directory))


def start_writer(directory: Path, first: int, last: int, max_bytes: int = 1 << 30) -> subprocess.Popen[str]:
    """Another process that stores blocks [first, last)."""
    arguments = [str(directory), str(first), str(last), str(max_bytes)]
    command = [sys.executable, "-m", "tests.transfer.files", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _write() -> None:
    directory, first, last, max_bytes = sys.argv[1:]
    node = open_node(Path(directory), max_bytes=int(max_bytes))
    for number in range(int(first), int(last)):
        assert node.put(number)
        node.tier.tend()
        print(number, flush=True)


if __name__ == "__main__":
    _write()

"""KV blocks in files, below the host tier: NIXL's POSIX backend moves them between host memory and file.

    file    header, 4096 bytes | payload, block_bytes as they lie in the slab
    header  magic, version, header bytes, fingerprint digest, block hash, payload bytes, sha256 of the payload, zeros

Nothing in a file is believed. A block is read only if the file is as long as it has to be and its header says, byte
for byte, that it is this block of this fingerprint; and it counts only if the payload, once in memory, has the checksum
the header names. So a torn, changed, foreign or misplaced file is a miss; it is counted, and removed.

What it relies on, measured with NIXL 1.5.1:
- A transfer that was short or failed raises; the agent's queue goes on. We don't: what raised leaves its destination in
  doubt, and the death of the native agent, which waits for the kernel to be done, ends the doubt (spec: quiet).
- On buffered files the copy happens inside `transfer`, without the GIL.
- SHA-256 runs at 1.3 GB/s where the processor has instructions for it, BLAKE2b at 0.5.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import stat
import struct
import time
import weakref
from collections import Counter
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Literal

from nixl_cu12 import nixl_agent, nixl_agent_config

from pdserve.errors import StartupError
from pdserve.kv.layout import Fingerprint
from pdserve.request import BlockHash, BlockId
from pdserve.transfer.file_space import SCAN_EVERY_S, FileSpace

log = logging.getLogger(__name__)

# It announces each agent on standard output, which belongs to the command that runs.
logging.getLogger("nixl").setLevel(logging.WARNING)

MAGIC = b"PDSKVBLK"
# One line of history a bump:
# 1  one page of header, sha256.
FORMAT_VERSION = 1
HEADER_BYTES = 4096
HEADER = struct.Struct("<8sII32s32sQ32s")
CHECKSUM_BYTES = 32
CHECKSUM = slice(HEADER.size - CHECKSUM_BYTES, HEADER.size)

COUNTERS = (
    "hits",  # blocks read and found good
    "misses",  # blocks asked for that no file holds, or none that could be opened
    "corrupt",  # files that were no good
    "stored",  # files written
    "already_stored",  # blocks whose file was there
    "failed_stores",
    "bytes_read",
    "bytes_written",
)

# Between looks at a transfer that the kernel goes on with by itself.
POLL_S = 0.0002

Operation = Literal["READ", "WRITE"]
_agent_numbers = count()


def fingerprint_digest(fingerprint: Fingerprint) -> bytes:
    """32 bytes that differ wherever two nodes may not read each other's blocks, or not each other's files."""
    told = {"format": FORMAT_VERSION, **asdict(fingerprint)}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).digest()


def block_header(digest: bytes, block_hash: BlockHash, payload_bytes: int, checksum: bytes) -> bytes:
    """The first page of a block's file: all of it, so that readers can compare instead of parse."""
    fields = HEADER.pack(MAGIC, FORMAT_VERSION, HEADER_BYTES, digest, block_hash, payload_bytes, checksum)
    return fields.ljust(HEADER_BYTES, b"\0")


class MoveFailed(Exception):
    """A payload was not moved. Nothing moves any more."""


class PosixMover:
    """Moves bytes between a slab in host memory and open files. Raises StartupError where NIXL can't do that."""

    def __init__(self, slab_ptr: int, num_bytes: int) -> None:
        self._region = (slab_ptr, num_bytes, 0, "")
        self._agent: nixl_agent | None = self._new_agent()

    def _new_agent(self) -> nixl_agent:
        name = f"files-{os.getpid()}-{next(_agent_numbers)}"
        try:
            agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
            # The pool's default size takes 10 ms to make; we have one transfer open at a time.
            agent.create_backend("POSIX", {"use_aio": "true", "ios_pool_size": "64"})
            agent.register_memory([self._region], "DRAM")
        except Exception as error:  # native exceptions have no base of their own
            raise StartupError(
                f"NIXL's POSIX backend, which the file tier needs, doesn't start ({type(error).__name__}: {error}): "
                "check the nixl-cu12 install and the kernel's fs.aio-max-nr, or start without --kv-dir"
            ) from None
        return agent

    def move(self, operation: Operation, address: int, num_bytes: int, fd: int, offset: int) -> None:
        """READ: from the file at `offset` to `address`; WRITE: the other way. Returns when done; raises MoveFailed."""
        fault = self._try_move(operation, address, num_bytes, fd, offset)
        if fault is not None:  # here, where no traceback holds the agent any more
            self.close()
            raise MoveFailed(fault)

    def _try_move(self, operation: Operation, address: int, num_bytes: int, fd: int, offset: int) -> str | None:
        """What went wrong, if anything."""
        try:
            agent = self._agent = self._agent or self._new_agent()
            file = agent.register_memory([(0, offset + num_bytes, fd, "")], "FILE")
            memory_end = agent.get_xfer_descs([(address, num_bytes, 0)], "DRAM")
            file_end = agent.get_xfer_descs([(offset, num_bytes, fd)], "FILE")
            handle = agent.initialize_xfer(operation, memory_end, file_end, agent.name)
            state = agent.transfer(handle)
            while state == "PROC":
                time.sleep(POLL_S)
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
            agent.deregister_memory(file)
        except Exception as error:  # native exceptions have no base of their own
            return f"{type(error).__name__}: {error}"
        return None if state == "DONE" else f"transfer state {state}"

    def close(self) -> None:
        """Destroy the native agent: the slab is quiet from then on. The next move makes a new one."""
        if self._agent is None:
            return
        native = weakref.ref(self._agent.agent)
        self._agent = None
        assert native() is None, "a NIXL agent outlived its files: somebody still holds what it made"


class FileTier:
    """Blocks of host memory to files and back. Every method belongs to one thread and may wait for the disk.

    slab_ptr: the address of [num_blocks, block_bytes] bytes of host memory that outlive the tier. max_bytes: of all
    files in `directory`, whoever wrote them. Several nodes of one machine may use one directory at a time.
    Raises StartupError where the directory or NIXL's POSIX backend can't be used.
    """

    def __init__(
        self,
        directory: Path,
        fingerprint: Fingerprint,
        *,
        slab_ptr: int,
        num_blocks: int,
        block_bytes: int,
        max_bytes: int,
        scan_every_s: float = SCAN_EVERY_S,
    ) -> None:
        self._slab_ptr = slab_ptr
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._digest = fingerprint_digest(fingerprint)
        self._counts = Counter(dict.fromkeys(COUNTERS, 0))
        self._is_failing = False
        self._mover = PosixMover(slab_ptr, num_blocks * block_bytes)
        self._space = FileSpace(directory, self._digest, HEADER_BYTES + block_bytes, max_bytes, scan_every_s)

    def has(self, block_hash: BlockHash) -> bool:
        """A file of the right size is there. Its contents are looked at by `load`; a miss is counted here."""
        is_there = self._space.holds(self._space.path(block_hash))
        if not is_there:
            self._counts["misses"] += 1
        return is_there

    def load(self, block_hash: BlockHash, block: BlockId) -> bool:
        """Read a block into the slab and verify it there. False is a miss: the block then holds anything at all."""
        path = self._space.path(block_hash)
        try:
            # A link is not followed, and a pipe in the way is not waited for.
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            self._counts["misses"] += 1
            return False
        try:
            is_good = self._read(fd, block_hash, block)
        except OSError as error:
            log.warning("%s could not be read: %s", path, error)
            is_good = False
        finally:
            os.close(fd)
        if is_good:
            self._counts["hits"] += 1
            self._counts["bytes_read"] += self._block_bytes
        else:
            self._counts["corrupt"] += 1
            self._space.discard(path)
        return is_good

    def _read(self, fd: int, block_hash: BlockHash, block: BlockId) -> bool:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_size != HEADER_BYTES + self._block_bytes:
            return False
        header = os.pread(fd, HEADER_BYTES, 0)
        checksum = header[CHECKSUM]
        if len(checksum) != CHECKSUM_BYTES or header != self._header(block_hash, checksum):
            return False
        try:
            self._mover.move("READ", self._address(block), self._block_bytes, fd, HEADER_BYTES)
        except MoveFailed as error:
            log.warning("a block file could not be read: %s", error)
            return False
        if self._checksum(block) != checksum:
            return False
        self._space.touch(fd, found)
        return True

    def store(self, block_hash: BlockHash, block: BlockId) -> bool:
        """Write a block of the slab, unless its file is there. False: it is not stored; a full disk is no error."""
        path = self._space.path(block_hash)
        if self._space.holds(path):
            self._counts["already_stored"] += 1
            return True
        try:
            is_stored = self._space.make_room() and self._write(path, block_hash, block)
        except (OSError, MoveFailed) as error:
            if not self._is_failing:  # said once, until a write succeeds again
                log.warning("the file tier could not write %s: %s", path, error)
            is_stored = False
        self._is_failing = not is_stored
        self._counts["stored" if is_stored else "failed_stores"] += 1
        return is_stored

    def _write(self, path: str, block_hash: BlockHash, block: BlockId) -> bool:
        """The header goes last, so that a file cut short has none."""
        header = self._header(block_hash, self._checksum(block))
        with self._space.writing(path) as fd:
            self._mover.move("WRITE", self._address(block), self._block_bytes, fd, HEADER_BYTES)
            if os.pwrite(fd, header, 0) != HEADER_BYTES:
                raise OSError(f"{path}: its header was written in part")
        self._counts["bytes_written"] += self._block_bytes
        return True

    def tend(self) -> bool:
        """A small step of keeping the directory in bounds; True while there is more to do. Call it when idle."""
        return self._space.tend()

    def counters(self) -> dict[str, int]:
        """What came of loads and stores so far, by name; any thread may ask."""
        return {**self._counts, "evicted": self._space.num_evicted, "bytes": self._space.num_bytes}

    def close(self) -> None:
        """Nothing touches the slab afterwards."""
        self._mover.close()

    def _header(self, block_hash: BlockHash, checksum: bytes) -> bytes:
        return block_header(self._digest, block_hash, self._block_bytes, checksum)

    def _address(self, block: BlockId) -> int:
        assert 0 <= block < self._num_blocks, f"host block {block} of {self._num_blocks}"
        return self._slab_ptr + block * self._block_bytes

    def _checksum(self, block: BlockId) -> bytes:
        payload = (ctypes.c_ubyte * self._block_bytes).from_address(self._address(block))
        return hashlib.sha256(payload).digest()

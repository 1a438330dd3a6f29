"""A directory of block files that several nodes of one machine share, kept under a bound by their last use.

    directory/
      pdserve-kv-<32 hex>/               one a fingerprint: a node finds only what its own kind wrote
        a/b/<block hash>.kv              a, b: the first two digits of the hash; complete, and only ever replaced whole
        a/b/<block hash>.<random>.tmp    being written, for as long as somebody holds its lock

A file's time of last use is its mtime, which we set ourselves: mounts differ in what they do to atime. The bound is
over all fingerprints, so that what an older model left goes first. Files come and go at any moment by the hand of
other nodes: two that evict at once, or write the same block at once, do no harm. What is not named as above is never
touched. The size is known from a scan and from our own writes since; others' writes are seen by the next scan.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from pdserve.errors import StartupError
from pdserve.request import BlockHash

# Every node looks again after this time, and after it has itself written this part of the bound.
SCAN_EVERY_S = 60.0
SCAN_EVERY_PART = 1 / 50
# Directories and files; some milliseconds.
SCAN_STEP = 500
# Eviction begins above the bound and goes on to this part of it, so that it isn't needed again at once.
LOW_WATER = 0.95
# A hit younger than this isn't noted: order within it is of no use, and each note is a write to the file system.
TOUCH_EVERY_S = 30.0

HASH_BYTES = 32
ROOT_NAME = re.compile(r"pdserve-kv-[0-9a-f]{32}")
BLOCK_NAME = re.compile(r"[0-9a-f]{64}\.kv")
TEMPORARY_NAME = re.compile(r"[0-9a-f]{64}\.[0-9a-f]{16}\.tmp")


class FileSpace:
    """The files of one fingerprint, to find and to add; those of all, to bound. Used by one thread.

    digest: of the fingerprint, 32 bytes. file_bytes: of each file we write. num_evicted: files removed for room.
    Raises StartupError where the directory can't be used or the bound is less than one file.
    """

    def __init__(
        self, directory: Path, digest: bytes, file_bytes: int, max_bytes: int, scan_every_s: float = SCAN_EVERY_S
    ) -> None:
        if max_bytes < file_bytes:
            raise StartupError(
                f"the file tier in {directory} may hold {max_bytes} bytes and one block takes {file_bytes}: "
                "raise --kv-dir-gb"
            )
        self._directory = directory
        self._root = str(directory / f"pdserve-kv-{digest[:16].hex()}")
        self._file_bytes = file_bytes
        self._max_bytes = max_bytes
        self._low_water_bytes = max(int(LOW_WATER * max_bytes), file_bytes)
        self._scan_every_s = scan_every_s
        self._num_bytes = 0  # of all fingerprints, as far as we know
        self._oldest: list[tuple[int, int, str]] = []  # (mtime ns, bytes, path) of the last scan, oldest last
        self._num_bytes_since_scan = 0  # written by us
        self._is_over = False  # evicting down to the low water
        self._scan: Iterator[bool] | None = None
        self._next_scan_s = 0.0
        self.num_evicted = 0
        self._make_root()
        self._scan_all()

    def _make_root(self) -> None:
        """Blocks tell what users wrote, so what we make is for our own user alone."""
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.makedirs(self._root, mode=0o700, exist_ok=True)
            if not os.access(self._root, os.R_OK | os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            root = os.open(self._root, os.O_RDONLY)
            try:
                fcntl.flock(root, fcntl.LOCK_SH)  # not every file system can
            finally:
                os.close(root)
        except OSError as error:
            raise StartupError(
                f"{self._directory} can't hold the file tier ({error.strerror}): give --kv-dir a directory "
                "that this user may write, on a local file system"
            ) from None

    @property
    def num_bytes(self) -> int:
        """All files' bytes, as of the last scan and our own writes and evictions since."""
        return self._num_bytes

    # ------------------------------------------------------------ one block

    def path(self, block_hash: BlockHash) -> str:
        assert len(block_hash) == HASH_BYTES, f"a block hash of {len(block_hash)} bytes"
        name = block_hash.hex()
        return f"{self._root}/{name[0]}/{name[1]}/{name}.kv"

    def holds(self, path: str) -> bool:
        """A regular file of the right size is there; what is in it has not been looked at."""
        try:
            found = os.lstat(path)
        except OSError:
            return False
        return stat.S_ISREG(found.st_mode) and found.st_size == self._file_bytes

    def touch(self, fd: int, found: os.stat_result) -> None:
        """Note that the file was used now."""
        if abs(time.time() - found.st_mtime) > TOUCH_EVERY_S:
            with contextlib.suppress(OSError):  # another user's file may be read and not touched
                os.utime(fd)

    @contextlib.contextmanager
    def writing(self, path: str) -> Iterator[int]:
        """A new file, open for writing, that takes its place at `path` if the block ends well and is gone if not.

        Nothing is synced: after a power failure a file may be torn, which its checksum tells. The lock ends with the
        process, however it ends, so that anybody can tell an abandoned file from one being written. Raises OSError.
        """
        temporary, fd = self._create(path.removesuffix(".kv"))
        try:
            os.posix_fallocate(fd, 0, self._file_bytes)  # a full disk is told here, and not in the middle of the copy
            yield fd
            os.rename(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
        finally:
            os.close(fd)
        self._num_bytes += self._file_bytes
        self._num_bytes_since_scan += self._file_bytes

    def _create(self, stem: str) -> tuple[str, int]:
        """A new file that we hold the lock of. A scan may take it for abandoned before we do: then another is made."""
        while True:
            path = f"{stem}.{secrets.token_hex(8)}.tmp"
            fd = _open_new(path)
            if _lock(fd) and os.fstat(fd).st_nlink:
                return path, fd
            os.close(fd)

    def discard(self, path: str) -> None:
        """Remove a file that is no good. A directory in the way stays: nothing of ours is one."""
        with contextlib.suppress(OSError):
            num_bytes = os.lstat(path).st_size
            os.unlink(path)
            self._num_bytes -= num_bytes

    # ------------------------------------------------------------ the bound

    def make_room(self) -> bool:
        """Evict until one more file fits under the bound; False if that is not to be had."""
        while self._num_bytes + self._file_bytes > self._max_bytes:
            self._is_over = True
            if not self._evict_one():
                return False
        return True

    def tend(self) -> bool:
        """One small step of what is due: evicting, scanning. True while there is more to do."""
        if self._is_over:
            self._is_over = self._num_bytes > self._low_water_bytes and self._evict_one()
        # Beside it, not after it: where stores never pause, evicting never ends.
        if self._scan is None and self._is_scan_due():
            self._scan = self._scan_steps()
        if self._scan is not None and not next(self._scan, False):
            self._scan = None
            self._is_over |= self._num_bytes > self._max_bytes
        return self._is_over or self._scan is not None

    def _is_scan_due(self) -> bool:
        has_written_much = self._num_bytes_since_scan > SCAN_EVERY_PART * self._max_bytes
        return has_written_much or time.monotonic() >= self._next_scan_s

    def _evict_one(self) -> bool:
        """Remove the file that was used longest ago, or find that another node did; False where there is none."""
        if not self._oldest:
            self._scan_all()
        while self._oldest:
            used_ns, num_bytes, path = self._oldest.pop()
            try:
                if os.lstat(path).st_mtime_ns != used_ns:
                    continue  # used since; the next scan gives it its place
                os.unlink(path)
                self.num_evicted += 1
            except FileNotFoundError:
                pass
            except OSError:
                continue
            self._num_bytes -= num_bytes
            return True
        return False

    def _scan_all(self) -> None:
        self._scan = None
        for _ in self._scan_steps():
            pass

    def _scan_steps(self) -> Iterator[bool]:
        """Look at every file, about SCAN_STEP of them a step, and remove what dead writers left.

        Our own writes meanwhile are counted on top, seen or not: too much rather than too little, until the next scan.
        """
        self._num_bytes_since_scan = 0
        num_bytes = 0
        num_seen = 0
        found: list[tuple[int, int, str]] = []
        for leaf in self._leaves():
            entries = _entries(leaf)
            for entry in entries:
                with contextlib.suppress(OSError):  # it has gone meanwhile
                    seen = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(seen.st_mode):
                        continue
                    if BLOCK_NAME.fullmatch(entry.name):
                        found.append((seen.st_mtime_ns, seen.st_size, entry.path))
                        num_bytes += seen.st_size
                    elif TEMPORARY_NAME.fullmatch(entry.name) and not _remove_abandoned(entry.path):
                        num_bytes += seen.st_size
            num_seen += 1 + len(entries)
            if num_seen > SCAN_STEP:
                num_seen = 0
                yield True
        found.sort(reverse=True)
        self._oldest = found
        self._num_bytes = num_bytes + self._num_bytes_since_scan
        self._next_scan_s = time.monotonic() + self._scan_every_s

    def _leaves(self) -> Iterator[str]:
        for root in _directories(str(self._directory), ROOT_NAME):
            for first in _directories(root, re.compile("[0-9a-f]")):
                yield from _directories(first, re.compile("[0-9a-f]"))


def _entries(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:
        return []


def _directories(parent: str, name: re.Pattern[str]) -> list[str]:
    return [e.path for e in _entries(parent) if name.fullmatch(e.name) and e.is_dir(follow_symlinks=False)]


def _remove_abandoned(path: str) -> bool:
    """Remove a file whose writer is gone; False while somebody writes it."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        is_abandoned = _lock(fd)
        if is_abandoned:
            os.unlink(path)
    finally:
        os.close(fd)
    return is_abandoned


def _lock(fd: int) -> bool:
    """Lock the file for ourselves; False while somebody else has it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _open_new(path: str) -> int:
    """Makes the file, and the directories that it needs."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags, 0o600)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        return os.open(path, flags, 0o600)

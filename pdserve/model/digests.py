"""Digests of files that were read whole, kept from one start to the next: one small file each, in the user's cache.

    DIR/<hash of the path>      {"digest": ..., "path": ..., and the rest of the stamp}, and a line that tells damage

A digest counts only for a file whose stamp is what it was. Entries are replaced by a rename, so that any number of
processes may read and write them; one that is damaged, of another form or out of date is as good as none.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path

log = logging.getLogger(__name__)

MAX_ENTRIES = 1024
# File systems keep times as coarsely as this: a file written so lately may be written again and keep its stamp.
SETTLED_NS = 2_000_000_000


@dataclass(frozen=True, slots=True)
class Stamp:
    """Which file it was, and in which state. Whatever is written to it moves changed_ns, which no program can set.

    path: without symbolic links. modified_ns, changed_ns: mtime and ctime.
    """

    path: str
    device: int
    inode: int
    num_bytes: int
    modified_ns: int
    changed_ns: int


def stamp_of(path: Path) -> Stamp:
    """The file's as it is now. Raises OSError."""
    status = path.stat()
    return Stamp(
        path=str(path.resolve()),
        device=status.st_dev,
        inode=status.st_ino,
        num_bytes=status.st_size,
        modified_ns=status.st_mtime_ns,
        changed_ns=status.st_ctime_ns,
    )


class DigestCache:
    """Digests by stamp, the last `max_entries` that were kept. Where it cannot write, nothing is kept."""

    def __init__(self, directory: Path, max_entries: int = MAX_ENTRIES, settled_ns: int = SETTLED_NS) -> None:
        self._directory = directory
        self._max_entries = max_entries
        self._settled_ns = settled_ns
        self._is_writable = True

    def get(self, stamp: Stamp) -> str | None:
        """The digest of the file's content; None where it has to be read."""
        try:
            raw = self._path(stamp).read_bytes()
        except OSError:
            return None
        digest = _digest_in(raw)
        return digest if digest is not None and raw == _entry(stamp, digest) else None

    def keep(self, stamp: Stamp, digest: str, *, read_ns: int) -> None:
        """read_ns: the wall clock when reading began; a file that was changed just before has to be read again."""
        if not self._is_writable or read_ns - stamp.changed_ns < self._settled_ns:
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._write(self._path(stamp), _entry(stamp, digest))
            self._drop_oldest()
        except OSError as error:
            self._is_writable = False
            log.warning("the next start reads the weights again, as their digests cannot be kept: %s", error)

    def _path(self, stamp: Stamp) -> Path:
        """One a path, so that a file that changed takes its own place."""
        return self._directory / blake2b(os.fsencode(stamp.path), digest_size=16).hexdigest()

    def _write(self, path: Path, entry: bytes) -> None:
        # A process killed here leaves a file that nobody reads; it is dropped like an entry, when it is the oldest.
        with tempfile.NamedTemporaryFile(dir=self._directory, delete=False) as file:
            try:
                file.write(entry)
                file.flush()
                os.replace(file.name, path)
            except OSError:
                os.unlink(file.name)
                raise

    def _drop_oldest(self) -> None:
        with os.scandir(self._directory) as entries:
            ages = sorted((_modified_ns(entry), entry.path) for entry in entries)
        for _, path in ages[: max(0, len(ages) - self._max_entries)]:
            Path(path).unlink(missing_ok=True)


def _modified_ns(entry: os.DirEntry[str]) -> int:
    """0 for one that another process has just dropped."""
    try:
        return entry.stat().st_mtime_ns
    except FileNotFoundError:
        return 0


def _entry(stamp: Stamp, digest: str) -> bytes:
    told = json.dumps({"digest": digest, **asdict(stamp)}).encode()
    return told + b"\n" + _check(told)


def _digest_in(raw: bytes) -> str | None:
    """None for what is not an entry of ours, whole."""
    told, _, check = raw.partition(b"\n")
    if check != _check(told):
        return None
    try:
        return str(json.loads(told)["digest"])
    except (ValueError, KeyError, TypeError):
        return None


def _check(told: bytes) -> bytes:
    """What tells that an entry is damaged."""
    return blake2b(told, digest_size=16).hexdigest().encode()

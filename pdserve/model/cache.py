"""A directory of files that is either whole or not there: built aside, sealed with a manifest, renamed into place.

    DIR/                    what callers use
    DIR/manifest.json       written last: source, and size, modification time and sha256 of every file
    .NAME.lock              held by whoever builds; the others wait and then find the work done
    .NAME.PID.tmp           being built; .NAME.PID.old: a broken one on its way out

A process that is killed leaves at most a .tmp or .old behind, which the next builder removes; its lock dies with it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from pdserve.errors import StartupError

MANIFEST = "manifest.json"


def is_intact(directory: Path, source: str, *, thorough: bool) -> bool:
    """Whether `directory` was sealed for `source` and still is what was sealed.

    A file of the recorded size and modification time is taken as unchanged unless `thorough`; else its digest decides.
    """
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if manifest["source"] != source:
            return False
        return all(_is_unchanged(directory / name, was, thorough) for name, was in manifest["files"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        # Missing, cut short, or no manifest of ours: whatever it is, it has to be built again.
        return False


def _is_unchanged(path: Path, was: dict[str, str | int], thorough: bool) -> bool:
    status = path.stat()
    if status.st_size != was["num_bytes"]:
        return False
    if not thorough and status.st_mtime_ns == was["modified_ns"]:
        return True
    return sha256(path) == was["sha256"]


def sha256(path: Path) -> str:
    """Hex digest of the file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def install(directory: Path, source: str, build: Callable[[Path], None], *, lock_deadline_s: float) -> None:
    """Make `directory` whole for `source`; `build` fills an empty directory, and runs only where it has to.

    Any number of processes may do this at once. Raises what `build` raises, OSError, and StartupError where another
    process holds the lock past the deadline.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.parent / f".{directory.name}.lock", lock_deadline_s):
        if is_intact(directory, source, thorough=True):
            return
        _remove_leftovers(directory)
        built = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
        built.mkdir()
        try:
            build(built)
            _seal(built, source)
            if directory.exists():
                directory.rename(directory.with_name(f".{directory.name}.{os.getpid()}.old"))
            built.rename(directory)
        finally:
            _remove_leftovers(directory)


def _seal(directory: Path, source: str) -> None:
    """Write the manifest, once everything it speaks of is on the disk."""
    files = {}
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        status = path.stat()
        files[path.name] = {
            "num_bytes": status.st_size,
            "modified_ns": status.st_mtime_ns,
            "sha256": sha256(path),
        }
    text = json.dumps({"source": source, "files": files}, indent=2) + "\n"
    (directory / MANIFEST).write_text(text, encoding="utf-8")


def _remove_leftovers(directory: Path) -> None:
    """Only the lock's holder may: nobody else is building then."""
    for suffix in ("tmp", "old"):
        for path in directory.parent.glob(f".{directory.name}.*.{suffix}"):
            shutil.rmtree(path, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path, deadline_s: float) -> Iterator[None]:
    """Hold the lock file; it is never deleted, as a waiter would then hold a lock on a file nobody else opens."""
    end = time.monotonic() + deadline_s
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise StartupError(
                        f"another process has held {path} for {deadline_s:g} s; end it and try again"
                    ) from None
                time.sleep(0.1)
        yield

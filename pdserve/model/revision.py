"""What a model computes, as one text: a digest over every byte of the files that decide it.

Two nodes share KV, and a node takes KV back from files, where their texts are equal: a byte that the text does not
speak for would give wrong answers with nothing to tell.

Of the tokenizer it says nothing: KV is that of token ids, which come to a prefill node as such, and the node that a
client asks is the only one to turn text into them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from pdserve.errors import StartupError
from pdserve.model.checkpoint_files import checkpoint_files
from pdserve.model.digests import DigestCache, Stamp, stamp_of
from pdserve.model.progress import Progress, no_progress

STEP = "checking weights"
# hashlib and file reads let go of the GIL for this long at a time: some milliseconds.
BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Revision:
    """Of the model in `directory`. text: equal for equal files, wherever they are. stamps: of those files, as read."""

    directory: Path
    text: str
    stamps: tuple[Stamp, ...]

    def renewed(self, digests: DigestCache) -> Revision:
        """This one, of the files as they are now: those that were touched are read again.

        Raises StartupError where `text` does not speak for them.
        """
        if self._changed_path() is None:
            return self
        now = read_revision(self.directory, digests)
        if now.text != self.text:
            raise StartupError(f"{self.directory} holds another model than when the node started: start the node again")
        return now

    def refuse_changed(self) -> None:
        """Raises StartupError where a file was touched since it was read, even if it is the same again by now."""
        if (path := self._changed_path()) is not None:
            raise _changed(path)

    def _changed_path(self) -> str | None:
        try:
            now = _stamps(_files(self.directory))
        except OSError as error:
            raise _unreadable(self.directory, error) from error
        if now == self.stamps:
            return None
        return next((was.path for was, is_now in zip(self.stamps, now, strict=False) if was != is_now), now[-1].path)


def read_revision(directory: Path, digests: DigestCache, progress: Progress = no_progress) -> Revision:
    """Reads every byte of the files that `digests` does not know. Progress counts bytes; what it raises ends the work.

    Raises StartupError where files are missing, cannot be read, or change meanwhile.
    """
    try:
        files = _files(directory)
        stamps = _stamps(files)
        whole = _read_unknown(dict(zip(stamps, files, strict=True)), digests, progress)
    except OSError as error:
        raise _unreadable(directory, error) from error
    found = [[path.name, stamp.num_bytes, whole[stamp]] for path, stamp in zip(files, stamps, strict=True)]
    return Revision(directory, blake2b(json.dumps(found).encode(), digest_size=16).hexdigest(), stamps)


def _files(directory: Path) -> list[Path]:
    """Those that decide what the model computes: generation_config.json can name the tokens that end an answer."""
    generation = directory / "generation_config.json"
    return [directory / "config.json", *([generation] if generation.exists() else []), *checkpoint_files(directory)]


def _stamps(files: Iterable[Path]) -> tuple[Stamp, ...]:
    """Raises OSError."""
    return tuple(map(stamp_of, files))


def _read_unknown(files: Mapping[Stamp, Path], digests: DigestCache, progress: Progress) -> dict[Stamp, str]:
    """The digest of each file's content, kept for the next start where it had to be read."""
    found = {stamp: digest for stamp in files if (digest := digests.get(stamp)) is not None}
    unknown = [stamp for stamp in files if stamp not in found]
    num_done, total = 0, sum(stamp.num_bytes for stamp in unknown)

    def count(num_bytes: int) -> None:
        nonlocal num_done
        num_done += num_bytes
        progress(STEP, num_done, total)

    for stamp in unknown:
        read_ns = time.time_ns()
        found[stamp] = _digest(files[stamp], count)
        if stamp_of(files[stamp]) != stamp:
            raise _changed(stamp.path)
        digests.keep(stamp, found[stamp], read_ns=read_ns)
    return found


def _digest(path: Path, count: Callable[[int], None]) -> str:
    """blake2b: without instructions for the purpose it is nearly twice as fast as sha256."""
    digest = blake2b(digest_size=32)
    block = memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while num_bytes := file.readinto(block):
            digest.update(block[:num_bytes])
            count(num_bytes)
    return digest.hexdigest()


def _unreadable(directory: Path, error: OSError) -> StartupError:
    return StartupError(f"{directory} cannot be read: {error}; fetch the model again")


def _changed(path: str) -> StartupError:
    return StartupError(f"{path} was changed while the model was loaded: start again once the model is complete")

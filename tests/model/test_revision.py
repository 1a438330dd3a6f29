"""A model's revision speaks for every byte that decides what it computes, and is read once where nothing changed."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.errors import StartupError
from pdserve.model.digests import DigestCache, stamp_of
from pdserve.model.revision import BLOCK_BYTES, read_revision

WINDOW = 64 * 1024
SHARDS = ("model-1.safetensors", "model-2.safetensors")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Two files of weights, one of several blocks, and what else may lie beside them."""
    directory = tmp_path / "model"
    directory.mkdir()
    contents = random.Random(7)
    (directory / SHARDS[0]).write_bytes(contents.randbytes(2 * BLOCK_BYTES + 12_345))
    (directory / SHARDS[1]).write_bytes(contents.randbytes(3_000))
    index = {"weight_map": {f"tensor.{number}": name for number, name in enumerate(SHARDS)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text('{"vocab_size": 300}')
    (directory / "generation_config.json").write_text('{"eos_token_id": 2}')
    (directory / "tokenizer.json").write_text("{}")
    return directory


class Reads:
    """Reads the revision with a cache of digests, and tells how many bytes of files that took."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.num_bytes = 0

    def text(self, directory: Path) -> str:
        self.num_bytes = 0
        return read_revision(directory, DigestCache(self.cache, settled_ns=0), self._tell).text

    def _tell(self, step: str, done: int, total: int) -> None:
        assert step == "checking weights"
        assert self.num_bytes < done <= total
        self.num_bytes = done


@pytest.fixture
def reads(tmp_path: Path) -> Reads:
    return Reads(tmp_path / "digests")


def text(directory: Path) -> str:
    """Of every byte, with nothing kept."""
    return read_revision(directory, DigestCache(directory / "none", settled_ns=10**18)).text


def num_bytes(*paths: Path) -> int:
    return sum(path.stat().st_size for path in paths)


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def rewrite(path: Path, content: bytes) -> None:
    """With the time of the last change put back. The clock of files ticks some hundred times a second."""
    before, changed_ns = path.stat(), stamp_of(path).changed_ns
    while stamp_of(path).changed_ns == changed_ns:
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def offsets(path: Path) -> Iterator[int]:
    """The first, the last, and one in every 64 KiB."""
    size, place = path.stat().st_size, random.Random(1)
    yield from (0, size - 1)
    yield from (place.randrange(start, min(start + WINDOW, size)) for start in range(0, size, WINDOW))


# ---------------------------------------------------------------- what it speaks for


@pytest.mark.parametrize("name", [*SHARDS, "config.json", "generation_config.json"])
def test_one_flipped_bit_anywhere_changes_it(model: Path, name: str) -> None:
    first, path = text(model), model / name
    for offset in offsets(path):
        flip(path, offset)
        assert text(model) != first, offset
        flip(path, offset)
    assert text(model) == first


def test_equal_files_elsewhere_are_equal(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "elsewhere" / "another-name"
    shutil.copytree(model, copy)
    (tmp_path / "link").symlink_to(copy)
    assert text(copy) == text(tmp_path / "link") == text(model)


def test_bytes_that_move_from_one_file_to_the_next_change_it(model: Path) -> None:
    first, (one, two) = text(model), (model / name for name in SHARDS)
    moved = one.read_bytes()[-8:]
    two.write_bytes(moved + two.read_bytes())
    one.write_bytes(one.read_bytes()[:-8])
    assert text(model) != first


def test_files_that_change_places_change_it(model: Path) -> None:
    first, (one, two) = text(model), (model / name for name in SHARDS)
    one.rename(model / "aside")
    two.rename(one)
    (model / "aside").rename(two)
    assert text(model) != first


def test_a_list_of_end_tokens_that_comes_or_goes_changes_it(model: Path) -> None:
    first = text(model)
    (model / "generation_config.json").unlink()
    assert text(model) != first


def test_the_tokenizer_is_none_of_its_business(model: Path) -> None:
    first = text(model)
    (model / "tokenizer.json").write_text('{"version": "1.0"}')
    assert text(model) == first


def test_what_a_manifest_says_of_a_file_is_not_believed(model: Path) -> None:
    path = model / SHARDS[0]
    status = path.stat()
    said = {"num_bytes": status.st_size, "modified_ns": status.st_mtime_ns, "sha256": "0" * 64}
    (model / "manifest.json").write_text(json.dumps({"source": "here", "files": {path.name: said}}))
    first = text(model)
    rewrite(path, b"\0" * status.st_size)
    assert text(model) != first


def test_missing_and_unreadable_files_are_named(model: Path) -> None:
    (model / SHARDS[1]).unlink()
    with pytest.raises(StartupError, match=f"lacks {SHARDS[1]}"):
        text(model)
    (model / SHARDS[1]).mkdir()
    with pytest.raises(StartupError, match=r"cannot be read: .*; fetch the model again"):
        text(model)


def test_a_file_that_changes_while_it_is_read_is_refused(model: Path) -> None:
    def write_on(step: str, done: int, total: int) -> None:
        rewrite(model / SHARDS[0], b"\0" * (2 * BLOCK_BYTES))

    with pytest.raises(StartupError, match=f"{SHARDS[0]} was changed while the model was loaded"):
        read_revision(model, DigestCache(model / "none"), write_on)


def test_what_the_progress_raises_ends_the_reading(model: Path) -> None:
    told: list[int] = []

    def stop(step: str, done: int, total: int) -> None:
        told.append(done)
        raise LookupError("told to stop")

    with pytest.raises(LookupError, match="told to stop"):
        read_revision(model, DigestCache(model / "none"), stop)
    assert len(told) == 1


# ---------------------------------------------------------------- what is read again


def test_files_that_are_as_they_were_are_not_read_again(model: Path, reads: Reads) -> None:
    read = [model / name for name in (*SHARDS, "config.json", "generation_config.json")]
    first = reads.text(model)
    assert reads.num_bytes == num_bytes(*read)
    assert reads.text(model) == first == text(model)
    assert reads.num_bytes == 0


def test_only_the_file_that_changed_is_read_again(model: Path, reads: Reads) -> None:
    first = reads.text(model)
    flip(model / SHARDS[1], 1_500)
    assert reads.text(model) == text(model) != first
    assert reads.num_bytes == num_bytes(model / SHARDS[1])


def test_content_that_changed_is_read_again_though_its_size_and_its_time_are_the_same(
    model: Path, reads: Reads
) -> None:
    path = model / SHARDS[1]
    first = reads.text(model)
    rewrite(path, bytes(byte ^ 1 for byte in path.read_bytes()))
    assert reads.text(model) == text(model) != first
    assert reads.num_bytes == num_bytes(path)


def test_a_copy_in_the_place_of_a_file_is_read_again(model: Path, reads: Reads) -> None:
    path = model / SHARDS[1]
    first = reads.text(model)
    shutil.copy2(path, model / "copy")
    (model / "copy").rename(path)
    assert reads.text(model) == first
    assert reads.num_bytes == num_bytes(path)


# ---------------------------------------------------------------- while a node runs


def test_files_that_were_only_touched_are_the_same_model(model: Path, reads: Reads) -> None:
    digests = DigestCache(reads.cache, settled_ns=0)
    first = read_revision(model, digests)
    assert first.renewed(digests) is first
    rewrite(model / SHARDS[0], (model / SHARDS[0]).read_bytes())
    with pytest.raises(StartupError, match=f"{SHARDS[0]} was changed while the model was loaded"):
        first.refuse_changed()
    again = first.renewed(digests)
    assert again.text == first.text
    again.refuse_changed()


@pytest.mark.parametrize("name", [*SHARDS, "config.json", "generation_config.json"])
def test_files_with_another_content_are_another_model(model: Path, reads: Reads, name: str) -> None:
    digests = DigestCache(reads.cache, settled_ns=0)
    first = read_revision(model, digests)
    content = bytearray((model / name).read_bytes())
    content[len(content) // 2] ^= 1
    rewrite(model / name, bytes(content))
    with pytest.raises(StartupError, match="holds another model than when the node started"):
        first.renewed(digests)


def test_a_file_that_came_is_noticed(model: Path) -> None:
    (model / "generation_config.json").unlink()
    first = read_revision(model, DigestCache(model / "none"))
    first.refuse_changed()
    (model / "generation_config.json").write_text("{}")
    with pytest.raises(StartupError, match="was changed"):
        first.refuse_changed()

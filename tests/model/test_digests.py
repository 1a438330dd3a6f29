"""Kept digests are used for exactly the files they were made of, whatever happens to where they are kept."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from multiprocessing import get_context
from pathlib import Path

import pytest

from pdserve.model.digests import SETTLED_NS, DigestCache, Stamp

STAMP = Stamp("/models/a", device=1, inode=2, num_bytes=3, modified_ns=4, changed_ns=5)
LATER_NS = STAMP.changed_ns + SETTLED_NS


def kept(directory: Path, stamp: Stamp = STAMP, digest: str = "d1") -> DigestCache:
    cache = DigestCache(directory)
    cache.keep(stamp, digest, read_ns=stamp.changed_ns + SETTLED_NS)
    return cache


def only_entry(directory: Path) -> Path:
    (path,) = directory.iterdir()
    return path


def test_a_digest_is_found_by_the_next_process(tmp_path: Path) -> None:
    kept(tmp_path / "new" / "digests")
    assert DigestCache(tmp_path / "new" / "digests").get(STAMP) == "d1"


@pytest.mark.parametrize("name", [field.name for field in fields(Stamp)])
def test_a_digest_is_of_no_file_with_another_stamp(tmp_path: Path, name: str) -> None:
    other = replace(STAMP, **{name: "/models/b" if name == "path" else 9})
    assert kept(tmp_path).get(other) is None


def test_a_file_that_changed_takes_the_place_of_what_it_was(tmp_path: Path) -> None:
    kept(tmp_path)
    changed = replace(STAMP, changed_ns=6)
    cache = kept(tmp_path, changed, "d2")
    assert (cache.get(STAMP), cache.get(changed)) == (None, "d2")
    only_entry(tmp_path)


def test_a_file_written_so_lately_that_it_may_change_and_keep_its_stamp_is_not_kept(tmp_path: Path) -> None:
    cache = DigestCache(tmp_path)
    for read_ns in (LATER_NS - 1, STAMP.changed_ns, STAMP.changed_ns - 10**18):
        cache.keep(STAMP, "d1", read_ns=read_ns)
        assert cache.get(STAMP) is None
    cache.keep(STAMP, "d1", read_ns=LATER_NS)
    assert cache.get(STAMP) == "d1"


def test_a_flipped_bit_of_an_entry_makes_it_none(tmp_path: Path) -> None:
    cache = kept(tmp_path)
    path = only_entry(tmp_path)
    whole = path.read_bytes()
    for offset in range(len(whole)):
        path.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        assert cache.get(STAMP) is None, offset
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert cache.get(STAMP) is None, length


DAMAGES: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "not text": lambda path: path.write_bytes(b"\xff\n" * 100),
    "of another form": lambda path: path.write_text("[]"),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\n"),
    "gone": lambda path: path.unlink(),
    "gone with its directory": lambda path: (path.unlink(), path.parent.rmdir()),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_entry_is_none_and_is_written_again(tmp_path: Path, damage: Callable[[Path], object]) -> None:
    cache = kept(tmp_path / "digests")
    damage(only_entry(tmp_path / "digests"))
    assert cache.get(STAMP) is None
    cache.keep(STAMP, "d2", read_ns=LATER_NS)
    assert cache.get(STAMP) == "d2"


def test_where_nothing_can_be_kept_nothing_is_and_the_log_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "digests").write_text("a file")
    cache = DigestCache(tmp_path / "digests")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            cache.keep(STAMP, "d1", read_ns=LATER_NS)
    assert cache.get(STAMP) is None
    (record,) = caplog.records
    assert "digests cannot be kept" in record.getMessage()


def test_an_entry_that_cannot_be_replaced_leaves_nothing_behind(tmp_path: Path) -> None:
    cache = kept(tmp_path)
    path = only_entry(tmp_path)
    path.unlink()
    path.mkdir()
    cache.keep(STAMP, "d1", read_ns=LATER_NS)
    assert cache.get(STAMP) is None
    assert only_entry(tmp_path) == path


def test_the_oldest_go_when_there_are_too_many_and_leftovers_with_them(tmp_path: Path) -> None:
    (tmp_path / "tmpleftover").write_text("half an ent")
    cache = DigestCache(tmp_path, max_entries=3)
    stamps = [replace(STAMP, path=f"/models/{number}") for number in range(8)]
    for stamp in stamps:
        cache.keep(stamp, stamp.path, read_ns=LATER_NS)
        _wait_for_a_tick(tmp_path)
    assert [cache.get(stamp) for stamp in stamps] == [None] * 5 + ["/models/5", "/models/6", "/models/7"]
    assert len(list(tmp_path.iterdir())) == 3


def _wait_for_a_tick(directory: Path) -> None:
    """Until a file written now is younger than those there are."""
    newest_ns = max(path.stat().st_mtime_ns for path in directory.iterdir())
    probe = directory.parent / f"{directory.name}.probe"
    while not probe.exists() or probe.stat().st_mtime_ns <= newest_ns:
        probe.write_bytes(b"x")


def keep_and_get(directory: Path, number: int) -> list[str | None]:
    """What one process finds of the files that all of them keep digests of."""
    cache, found = DigestCache(directory, max_entries=8), []
    for turn in range(100):
        stamp = replace(STAMP, path=f"/models/{(number + turn) % 12}")
        cache.keep(stamp, stamp.path, read_ns=time.time_ns())
        found.append(cache.get(stamp))
    return found


def test_processes_that_keep_at_once_find_whole_entries_or_none(tmp_path: Path) -> None:
    """There is less room than files, so that they drop each other's."""
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        answers = list(pool.map(keep_and_get, [tmp_path] * 3, range(3)))
    for number, found in enumerate(answers):
        wanted = [f"/models/{(number + turn) % 12}" for turn in range(100)]
        assert all(digest in (None, path) for digest, path in zip(found, wanted, strict=True))
        assert any(found)
    cache = DigestCache(tmp_path, max_entries=8)
    cache.keep(STAMP, "d1", read_ns=LATER_NS)
    assert len(list(tmp_path.iterdir())) <= 8

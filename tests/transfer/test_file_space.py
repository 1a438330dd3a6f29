"""The bound of a shared directory, and what may be removed to keep it."""

from __future__ import annotations

import fcntl
import os
from dataclasses import replace
from pathlib import Path

from tests.transfer.files import (
    FILE_BYTES,
    FINGERPRINT,
    FileNode,
    block_files,
    num_bytes,
    open_node,
    payload,
    temporaries,
)


def set_age(node: FileNode, number: int, age_s: float) -> None:
    used_s = node.path(number).stat().st_mtime - age_s
    os.utime(node.path(number), (used_s, used_s))


def kept(node: FileNode, numbers: range) -> list[int]:
    return [number for number in numbers if node.get(number) is not None]


def test_the_bytes_of_all_files_never_exceed_the_bound(tmp_path: Path) -> None:
    max_bytes = 20 * FILE_BYTES + 17
    node = open_node(tmp_path, max_bytes=max_bytes)
    for number in range(100):
        assert node.put(number)
        assert num_bytes(tmp_path) <= max_bytes
        node.tier.tend()
    node.tend_all()
    assert 0.85 * max_bytes < num_bytes(tmp_path) <= 0.95 * max_bytes
    assert node.tier.counters()["evicted"] == 100 - len(block_files(tmp_path))
    assert node.tier.counters()["bytes"] == num_bytes(tmp_path)


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    node = open_node(tmp_path, max_bytes=40 * FILE_BYTES)
    for number in range(40):
        node.put(number)
        set_age(node, number, 1000 - number)
    assert node.get(0) == payload(0)  # the oldest is used again
    for number in range(40, 50):
        node.put(number)
    assert kept(node, range(50)) == [0, *range(11, 50)]


def test_what_another_node_used_since_the_scan_stays(tmp_path: Path) -> None:
    other = open_node(tmp_path)
    for number in range(10):
        other.put(number)
        set_age(other, number, 1000 - number)
    node = open_node(tmp_path, max_bytes=10 * FILE_BYTES)
    assert other.get(0) == payload(0)
    for number in range(10, 12):
        node.put(number)
    assert kept(node, range(12)) == [0, *range(3, 12)]


def test_a_bound_of_one_block_keeps_the_last(tmp_path: Path) -> None:
    node = open_node(tmp_path, max_bytes=FILE_BYTES)
    for number in range(3):
        assert node.put(number)
        node.tend_all()
        assert kept(node, range(3)) == [number]


def test_a_lower_bound_is_kept_after_a_restart(tmp_path: Path) -> None:
    node = open_node(tmp_path)
    for number in range(30):
        node.put(number)
    lower = open_node(tmp_path, max_bytes=10 * FILE_BYTES, scan_every_s=0.0)
    lower.tend_all()
    assert num_bytes(tmp_path) <= 10 * FILE_BYTES


def test_what_other_nodes_wrote_is_seen_even_where_stores_never_pause(tmp_path: Path) -> None:
    """One step of tidying a store is all that a busy node takes."""
    max_bytes = 20 * FILE_BYTES
    ours, other = open_node(tmp_path, max_bytes=max_bytes), open_node(tmp_path, max_bytes=max_bytes)
    for number in range(25):
        ours.put(number)
        ours.tier.tend()
    for number in range(100, 110):
        other.put(number)  # it believes the directory to be empty
    for number in range(25, 28):
        ours.put(number)
        ours.tier.tend()
    assert num_bytes(tmp_path) <= max_bytes
    assert kept(ours, range(25, 28)) == [25, 26, 27]


def test_files_of_another_fingerprint_count_and_go_when_they_are_older(tmp_path: Path) -> None:
    old = open_node(tmp_path, fingerprint=replace(FINGERPRINT, model_revision="last year's"))
    for number in range(10):
        old.put(number)
        set_age(old, number, 1e6)
    node = open_node(tmp_path, max_bytes=12 * FILE_BYTES)
    for number in range(10, 20):
        assert node.put(number)
        assert num_bytes(tmp_path) <= 12 * FILE_BYTES
    assert kept(node, range(10, 20)) == list(range(10, 20))


def test_two_nodes_that_evict_at_once_do_no_harm(tmp_path: Path) -> None:
    for number in range(20):
        open_node(tmp_path).put(number)
    nodes = [open_node(tmp_path, max_bytes=20 * FILE_BYTES) for _ in range(2)]  # both know the same oldest files
    for number in range(20, 30):
        for node in nodes:
            assert node.put(number)
    assert num_bytes(tmp_path) <= 20 * FILE_BYTES
    assert kept(nodes[0], range(20, 30)) == kept(nodes[1], range(20, 30)) == list(range(20, 30))


def test_files_that_are_not_ours_are_never_touched(tmp_path: Path) -> None:
    first = open_node(tmp_path, max_bytes=2 * FILE_BYTES)
    first.put(1)
    leaf = first.path(1).parent
    name = first.path(1).name
    strangers = [
        tmp_path / "notes.kv",
        tmp_path / "pdserve-kv-mine" / "a" / "b" / name,
        tmp_path / "other" / "a" / "b" / name,
        leaf / "thesis.tmp",
        leaf / "thesis.kv",
        leaf.parent / name,
    ]
    for path in strangers:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(FILE_BYTES))
        os.utime(path, (1e9, 1e9))
    node = open_node(tmp_path, max_bytes=2 * FILE_BYTES, scan_every_s=0.0)
    for number in range(2, 12):
        node.put(number)
        node.tend_all()
    assert all(path.exists() for path in strangers)


def test_abandoned_writes_are_removed_and_those_under_way_are_not(tmp_path: Path) -> None:
    node = open_node(tmp_path)
    node.put(1)
    stem = str(node.path(1)).removesuffix("kv")
    abandoned, live = Path(f"{stem}{'0' * 16}.tmp"), Path(f"{stem}{'1' * 16}.tmp")
    abandoned.write_bytes(b"torn")
    with live.open("wb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        other = open_node(tmp_path)
        assert temporaries(tmp_path) == [live]
        assert other.tier.counters()["bytes"] == FILE_BYTES
    open_node(tmp_path)
    assert temporaries(tmp_path) == []

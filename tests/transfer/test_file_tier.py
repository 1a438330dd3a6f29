from __future__ import annotations

import os
import resource
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pdserve.errors import StartupError
from pdserve.request import BlockId
from pdserve.transfer.file_tier import HEADER_BYTES, MoveFailed, PosixMover, fingerprint_digest
from tests.transfer.files import (
    BLOCK_BYTES,
    FILE_BYTES,
    FINGERPRINT,
    UNTOUCHED,
    block_files,
    hash_of,
    open_node,
    payload,
    temporaries,
)


def test_a_block_comes_back_as_it_was_stored(tmp_path: Path) -> None:
    node = open_node(tmp_path)
    assert node.put(1)
    assert node.put(2)
    assert node.get(1) == payload(1)
    assert node.get(2) == payload(2)
    assert node.get(3) is None
    assert node.tier.counters() == {
        "hits": 2,
        "misses": 1,
        "corrupt": 0,
        "stored": 2,
        "already_stored": 0,
        "failed_stores": 0,
        "bytes_read": 2 * BLOCK_BYTES,
        "bytes_written": 2 * BLOCK_BYTES,
        "evicted": 0,
        "bytes": 2 * FILE_BYTES,
    }


@pytest.mark.parametrize("block", [0, 3])
def test_a_block_of_any_size_fills_its_place_in_the_slab_and_no_more(tmp_path: Path, block: int) -> None:
    node = open_node(tmp_path, block_bytes=10_007)
    node.slab[:] = np.random.default_rng(0).integers(0, 256, node.slab.shape, np.uint8)
    before = node.slab.copy()
    assert node.tier.store(hash_of(1), BlockId(block))
    node.slab[:] = UNTOUCHED
    assert node.tier.load(hash_of(1), BlockId(block))
    assert (node.slab[block] == before[block]).all()
    assert (np.delete(node.slab, block, 0) == UNTOUCHED).all()


def test_blocks_survive_a_restart(tmp_path: Path) -> None:
    node = open_node(tmp_path)
    assert all(node.put(number) for number in range(5))
    node.tier.close()
    node = open_node(tmp_path)
    assert [node.get(number) for number in range(5)] == [payload(number) for number in range(5)]
    assert node.tier.counters()["bytes"] == 5 * FILE_BYTES


@pytest.mark.parametrize(
    "other",
    [
        replace(FINGERPRINT, model_revision="weights-2"),
        replace(FINGERPRINT, layout_version=2),
        replace(FINGERPRINT, dtype="bfloat16"),
        replace(FINGERPRINT, tensor_parallel_size=2),
    ],
)
def test_a_node_with_another_fingerprint_finds_nothing(tmp_path: Path, other) -> None:
    assert open_node(tmp_path).put(1)
    stranger = open_node(tmp_path, fingerprint=other)
    assert not stranger.tier.has(hash_of(1))
    assert stranger.get(1) is None
    assert open_node(tmp_path).get(1) == payload(1)
    assert fingerprint_digest(other) != fingerprint_digest(FINGERPRINT)


def test_a_stored_block_is_not_written_again(tmp_path: Path) -> None:
    first, second = open_node(tmp_path), open_node(tmp_path)
    assert first.put(1)
    written = first.path(1).stat()
    assert second.put(1)
    assert first.path(1).stat() == written
    assert second.tier.counters()["already_stored"] == 1


def test_has_tells_what_is_there_without_reading_it(tmp_path: Path) -> None:
    node = open_node(tmp_path)
    assert not node.tier.has(hash_of(1))
    node.put(1)
    assert node.tier.has(hash_of(1))
    assert node.tier.counters()["misses"] == 1
    assert node.tier.counters()["bytes_read"] == 0


def test_a_hit_makes_an_old_file_young(tmp_path: Path) -> None:
    node = open_node(tmp_path)
    node.put(1)
    written = node.path(1).stat().st_mtime_ns
    node.get(1)
    assert node.path(1).stat().st_mtime_ns == written, "noted too often"
    os.utime(node.path(1), (1e9, 1e9))
    node.get(1)
    assert node.path(1).stat().st_mtime_ns >= written


def test_a_write_that_does_not_fit_the_disk_stores_nothing(tmp_path: Path) -> None:
    node = open_node(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES - 1, hard))
    try:
        assert not node.put(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert block_files(tmp_path) == temporaries(tmp_path) == []
    assert node.tier.counters()["failed_stores"] == 1
    assert node.put(1)
    assert node.get(1) == payload(1)


def test_what_it_makes_is_for_its_user_alone(tmp_path: Path) -> None:
    node = open_node(tmp_path / "a" / "kv")
    node.put(1)
    path = node.path(1)
    assert path.stat().st_mode & 0o077 == 0
    assert path.parents[2].stat().st_mode & 0o077 == 0


# ---------------------------------------------------------------- what can't start


def test_a_directory_that_cannot_be_made_is_refused_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=r"Not a directory.*--kv-dir"):
        open_node(tmp_path / "file" / "kv")


def test_a_bound_of_less_than_a_block_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=rf"may hold {FILE_BYTES - 1} bytes.*takes {FILE_BYTES}.*--kv-dir-gb"):
        open_node(tmp_path, max_bytes=FILE_BYTES - 1)


def test_a_nixl_without_the_posix_backend_is_refused_at_start(tmp_path: Path) -> None:
    """NIXL looks for its backends once a process."""
    program = f"""
from pathlib import Path
from pdserve.errors import StartupError
from tests.transfer.files import open_node
try:
    open_node(Path({str(tmp_path)!r}))
except StartupError as error:
    print(error.message)
"""
    environment = {**os.environ, "NIXL_PLUGIN_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert "NIXL's POSIX backend, which the file tier needs, doesn't start" in done.stdout
    assert "--kv-dir" in done.stdout


# ---------------------------------------------------------------- the mover


def test_a_failed_move_leaves_memory_quiet_and_the_next_one_works(tmp_path: Path) -> None:
    slab = np.full((2, BLOCK_BYTES), UNTOUCHED, np.uint8)
    mover = PosixMover(slab.ctypes.data, slab.nbytes)
    fd = os.open(tmp_path / "block", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"short", HEADER_BYTES)
    native = weakref.ref(mover._agent.agent)
    with pytest.raises(MoveFailed):
        mover.move("READ", slab.ctypes.data, BLOCK_BYTES, fd, HEADER_BYTES)
    assert native() is None, "what could still write is alive"
    os.pwrite(fd, payload(1), HEADER_BYTES)
    slab[:] = UNTOUCHED
    mover.move("READ", slab.ctypes.data, BLOCK_BYTES, fd, HEADER_BYTES)
    assert slab[0].tobytes() == payload(1)
    assert (slab[1] == UNTOUCHED).all()
    os.close(fd)
    with pytest.raises(MoveFailed):
        mover.move("WRITE", slab.ctypes.data, BLOCK_BYTES, fd, 0)

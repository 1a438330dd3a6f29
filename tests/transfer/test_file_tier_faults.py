"""Whatever happens to the files: the right bytes, or a miss."""

from __future__ import annotations

import os
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from pdserve.transfer.file_tier import HEADER_BYTES
from tests.transfer.files import (
    BLOCK_BYTES,
    FILE_BYTES,
    FINGERPRINT,
    FileNode,
    block_files,
    num_bytes,
    open_node,
    payload,
    start_writer,
    temporaries,
)

NUM_CORRUPTIONS = 220
BYSTANDER = 10_000
Corrupt = Callable[[Path, random.Random], None]


def flip_a_bit(path: Path, at: int, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def flip_in_the_fields(path: Path, rng: random.Random) -> None:
    flip_a_bit(path, rng.randrange(128), rng)


def flip_in_the_header(path: Path, rng: random.Random) -> None:
    flip_a_bit(path, rng.randrange(HEADER_BYTES), rng)


def flip_in_the_payload(path: Path, rng: random.Random) -> None:
    flip_a_bit(path, rng.randrange(HEADER_BYTES, FILE_BYTES), rng)


def truncate(path: Path, rng: random.Random) -> None:
    os.truncate(path, rng.choice([0, 17, HEADER_BYTES, rng.randrange(FILE_BYTES), FILE_BYTES - 1]))


def tear(path: Path, rng: random.Random) -> None:
    """The right length, and zeros from somewhere on, as after a power failure."""
    kept = rng.randrange(FILE_BYTES - 1)
    os.truncate(path, kept)
    os.truncate(path, FILE_BYTES)


def extend(path: Path, rng: random.Random) -> None:
    with path.open("ab") as file:
        file.write(rng.randbytes(rng.choice([1, 4096, BLOCK_BYTES])))


def put_another_block_there(path: Path, rng: random.Random) -> None:
    shutil.copyfile(bystander(path), path)


def swap_with_another_block(path: Path, rng: random.Random) -> None:
    other = bystander(path)
    ours = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(ours)


def keep_the_header_of_another_payload(path: Path, rng: random.Random) -> None:
    path.write_bytes(path.read_bytes()[:HEADER_BYTES] + bystander(path).read_bytes()[HEADER_BYTES:])


def put_noise_there(path: Path, rng: random.Random) -> None:
    path.write_bytes(rng.randbytes(FILE_BYTES))


def put_a_directory_there(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.mkdir()


def put_a_pipe_there(path: Path, rng: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def put_a_link_there(path: Path, rng: random.Random) -> None:
    path.unlink()
    path.symlink_to(rng.choice([bystander(path), Path("nowhere")]))


def put_another_fingerprints_block_there(path: Path, rng: random.Random) -> None:
    foreign = next(file for file in path.parents[3].glob(f"*/*/*/{path.name}") if file != path)
    shutil.copyfile(foreign, path)


CORRUPTIONS: tuple[Corrupt, ...] = (
    flip_in_the_fields,
    flip_in_the_header,
    flip_in_the_payload,
    truncate,
    tear,
    extend,
    put_another_block_there,
    swap_with_another_block,
    keep_the_header_of_another_payload,
    put_noise_there,
    put_a_directory_there,
    put_a_pipe_there,
    put_a_link_there,
    put_another_fingerprints_block_there,
)


def bystander(path: Path) -> Path:
    """A good file of another block of the same node."""
    return next(file for file in path.parents[2].rglob("*.kv") if file.is_file() and file != path)


@pytest.fixture
def node(tmp_path: Path) -> FileNode:
    return open_node(tmp_path)


def test_no_corruption_gives_wrong_bytes(tmp_path: Path, node: FileNode) -> None:
    stranger = open_node(tmp_path, fingerprint=replace(FINGERPRINT, model_revision="weights-2"))
    rng = random.Random(1)
    for number in range(NUM_CORRUPTIONS):
        assert node.put(BYSTANDER)
        assert node.put(number)
        own_path = node.path(number)
        stranger.slab[0] = 1  # another model's KV for the same tokens
        assert stranger.put(number)
        corrupt = CORRUPTIONS[number % len(CORRUPTIONS)]
        corrupt(own_path, rng)
        assert node.get(number) is None, corrupt.__name__
        assert node.get(BYSTANDER) in (payload(BYSTANDER), None), corrupt.__name__
        if corrupt is put_a_directory_there:
            assert not node.put(number)
            own_path.rmdir()
        # A bad file is out of the way at once, so that the block can be stored again.
        assert node.put(number), corrupt.__name__
        assert node.get(number) == payload(number), corrupt.__name__
    assert node.tier.counters()["corrupt"] > NUM_CORRUPTIONS / 2
    assert temporaries(tmp_path) == []


def test_a_bad_file_is_removed_and_counted(node: FileNode) -> None:
    node.put(1)
    path = node.path(1)
    flip_a_bit(path, HEADER_BYTES + 5, random.Random(0))
    assert node.get(1) is None
    assert not path.exists()
    assert node.get(1) is None
    counters = node.tier.counters()
    assert (counters["corrupt"], counters["misses"], counters["hits"]) == (1, 1, 0)
    assert counters["bytes"] == 0


def test_a_file_that_may_not_be_read_is_right_or_a_miss(node: FileNode) -> None:
    node.put(1)
    node.path(1).chmod(0)
    assert node.get(1) == (payload(1) if os.geteuid() == 0 else None)
    assert node.path(1).exists(), "somebody else may be able to read it"


def test_a_file_where_a_directory_should_be_is_a_miss_and_stores_nothing(tmp_path: Path, node: FileNode) -> None:
    node.put(1)
    leaf = node.path(1).parent
    shutil.rmtree(leaf)
    leaf.write_text("in the way")
    assert not node.put(1)
    assert node.get(1) is None
    assert leaf.read_text() == "in the way"


def test_a_directory_that_vanishes_is_made_again(tmp_path: Path, node: FileNode) -> None:
    node.put(1)
    shutil.rmtree(next(tmp_path.iterdir()))
    assert node.get(1) is None
    assert node.put(1)
    assert node.get(1) == payload(1)


# ---------------------------------------------------------------- several processes


def test_a_writer_killed_at_any_moment_leaves_right_blocks_or_none(tmp_path: Path) -> None:
    rng = random.Random(2)
    for _ in range(4):
        shutil.rmtree(tmp_path / "kv", ignore_errors=True)
        writer = start_writer(tmp_path / "kv", 0, 1_000_000)
        assert writer.stdout is not None
        for _ in range(rng.randrange(1, 200)):
            last = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        reader = open_node(tmp_path / "kv")
        assert temporaries(tmp_path) == []
        found = [reader.get(number) for number in range(last + 300)]
        assert [number for number, content in enumerate(found) if content not in (None, payload(number))] == []
        assert None not in found[: last + 1]
        assert reader.tier.counters()["corrupt"] == 0


def test_processes_that_share_a_directory_read_right_blocks_and_stay_in_bounds(tmp_path: Path) -> None:
    """Both write all blocks, evict each other's, and read what they find. Each learns of the other by scans."""
    max_bytes = 20 * FILE_BYTES
    node = open_node(tmp_path, max_bytes=max_bytes, scan_every_s=0.0)
    writer = start_writer(tmp_path, 0, 150, max_bytes)
    assert writer.stdout is not None
    num_hits = 0
    for line in writer.stdout:
        written, ours = int(line), int(line) * 7 % 150
        assert node.put(ours)
        node.tier.tend()
        for number in (written, ours):
            content = node.get(number)
            assert content in (payload(number), None)
            num_hits += content is not None
        assert len(block_files(tmp_path)) <= 30
    assert writer.wait() == 0
    node.tend_all()  # a scan begun while the other wrote
    node.tend_all()
    assert num_hits > 0
    assert num_bytes(tmp_path) <= max_bytes
    assert node.tier.counters()["corrupt"] == 0

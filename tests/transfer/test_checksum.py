"""What was read is compared with what was announced, byte by byte by way of a hash a block."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from pdserve.errors import ProtocolError
from pdserve.request import TransferId
from pdserve.transfer.base import Read, ReadId
from pdserve.transfer.checksum import BUDGET_S, Checksums, Mismatch, block_hash
from tests.transfer.conftest import PEER, blocks

T = TransferId(1)
NUM_BLOCKS, BLOCK_BYTES = 16, 3000
READ = Read(ReadId(1), PEER, blocks(40, 41), blocks(3, 5))


class Clock:
    """Each look at it takes as long as is set."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.step_s = 0.0

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def slab() -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, (NUM_BLOCKS, BLOCK_BYTES), np.uint8)


@pytest.fixture
def checksums(slab: np.ndarray, clock: Clock) -> Checksums:
    return Checksums(slab, clock)


def compared(checksums: Checksums) -> list[Mismatch]:
    found: list[list[Mismatch]] = []
    checksums.compare(T, found.append)
    while checksums.is_busy:
        checksums.advance()
    (differing,) = found
    return differing


def test_a_hash_is_of_every_byte_of_a_block(slab: np.ndarray) -> None:
    digest = hashlib.blake2b(slab[3].tobytes(), digest_size=8).digest()
    before = block_hash(slab[3])
    assert before == int.from_bytes(digest, "little") < 2**64
    for at in (0, BLOCK_BYTES - 1):
        slab[3, at] ^= 1
        assert block_hash(slab[3]) != before
        slab[3, at] ^= 1


def test_what_comes_first_is_hashed_first_and_no_call_takes_long(checksums: Checksums, clock: Clock) -> None:
    told: list[tuple[str, int]] = []
    checksums.hash(blocks(1, 2, 3), lambda hashes: told.append(("first", len(hashes))))
    checksums.hash(blocks(4), lambda hashes: told.append(("second", len(hashes))))
    clock.step_s = BUDGET_S
    for expected in ([], [], [("first", 3)], [("first", 3), ("second", 1)]):
        assert checksums.is_busy
        checksums.advance()
        assert told == expected
    assert not checksums.is_busy


def test_equal_blocks_are_in_order(checksums: Checksums, slab: np.ndarray) -> None:
    checksums.expect(T, READ, (block_hash(slab[3]), block_hash(slab[5])))
    assert compared(checksums) == []
    assert checksums.num_failures == 0


def test_one_bit_is_enough_and_the_block_and_its_peer_are_named(checksums: Checksums, slab: np.ndarray) -> None:
    checksums.expect(T, READ, (block_hash(slab[3]), block_hash(slab[5])))
    slab[5, 2999] ^= 0x80
    (differing,) = compared(checksums)
    assert differing == Mismatch(PEER, *blocks(41, 5))
    assert f"block 41 of {PEER}" in str(differing)
    assert checksums.num_failures == 1


def test_blocks_that_changed_places_are_found(checksums: Checksums, slab: np.ndarray) -> None:
    checksums.expect(T, READ, (block_hash(slab[5]), block_hash(slab[3])))
    assert len(compared(checksums)) == 2


@pytest.mark.parametrize("hashes", [(), (1,), (1, 2, 3)])
def test_a_chunk_without_a_hash_a_block_is_refused(checksums: Checksums, hashes: tuple[int, ...]) -> None:
    with pytest.raises(ProtocolError, match=f"2 blocks came with {len(hashes)} block_hashes"):
        checksums.expect(T, READ, hashes)


def test_a_transfer_that_is_over_leaves_nothing(checksums: Checksums) -> None:
    checksums.expect(T, READ, (1, 2))
    checksums.forget(T)
    assert compared(checksums) == []


def test_blocks_that_were_given_up_while_they_were_hashed_are_nobodys_failure(
    checksums: Checksums, slab: np.ndarray, clock: Clock
) -> None:
    """They may be somebody else's by then, and hold anything."""
    found: list[list[Mismatch]] = []
    clock.step_s = BUDGET_S
    checksums.expect(T, READ, (block_hash(slab[3]), block_hash(slab[5])))
    checksums.compare(T, found.append)
    checksums.advance()
    checksums.forget(T)
    slab[5] = 0
    while checksums.is_busy:
        checksums.advance()
    assert (found, checksums.num_failures) == ([], 0)

"""Hash chains, and the index from a prefix to the block that holds it."""

from __future__ import annotations

import pytest

from pdserve.request import BlockHash, BlockId
from pdserve.scheduler.prefix_cache import PrefixCache, extend_hashes


def chain(tokens: list[int], block_size: int = 4) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    extend_hashes(hashes, tokens, len(tokens) // block_size, block_size)
    return hashes


def test_a_hash_covers_every_token_up_to_its_end() -> None:
    original, changed_first, changed_last = chain(list(range(12))), chain([9, *range(1, 12)]), chain([*range(11), 9])
    assert all(mine != other for mine, other in zip(original, changed_first, strict=True))
    assert original[:2] == changed_last[:2]
    assert original[2] != changed_last[2]


def test_equal_blocks_at_different_depths_have_different_hashes() -> None:
    first, second = chain([1, 2, 3, 4, 1, 2, 3, 4])
    assert first != second


def test_a_chain_extended_step_by_step_equals_one_made_at_once() -> None:
    tokens, stepwise = list(range(20)), list[BlockHash]()
    for num_blocks in (1, 1, 0, 3, 5):
        extend_hashes(stepwise, tokens, num_blocks, 4)
    assert stepwise == chain(tokens)


def test_a_part_full_block_has_no_hash() -> None:
    assert len(chain(list(range(11)))) == 2


def test_the_longest_prefix_stops_at_the_first_block_that_is_missing() -> None:
    hashes, cache = chain(list(range(12))), PrefixCache()
    for block in (0, 2):
        cache.publish(hashes[block], BlockId(block))
    assert cache.longest(hashes) == [0]
    cache.publish(hashes[1], BlockId(1))
    assert cache.longest(hashes) == [0, 1, 2]


def test_the_first_block_that_holds_a_prefix_stays_the_one_that_is_found() -> None:
    (block_hash,), cache = chain(list(range(4))), PrefixCache()
    cache.publish(block_hash, BlockId(5))
    cache.publish(block_hash, BlockId(6))
    assert cache.longest([block_hash]) == [5]
    assert BlockId(6) not in cache
    assert len(cache) == 1


def test_a_block_holds_one_prefix_at_a_time() -> None:
    (first, second), cache = chain(list(range(8))), PrefixCache()
    cache.publish(first, BlockId(5))
    cache.publish(second, BlockId(5))
    assert cache.longest([second]) == []
    cache.forget(BlockId(5))
    cache.forget(BlockId(5))
    assert len(cache) == 0
    cache.publish(second, BlockId(5))
    assert cache.longest([second]) == [5]


def test_check_integrity_finds_an_index_that_is_not_two_way() -> None:
    (block_hash,), cache = chain(list(range(4))), PrefixCache()
    cache.publish(block_hash, BlockId(5))
    cache.check_integrity()
    cache._block_by_hash[block_hash] = BlockId(6)
    with pytest.raises(AssertionError):
        cache.check_integrity()

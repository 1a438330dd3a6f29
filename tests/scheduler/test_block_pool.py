"""Reference counts, the order of eviction, generations."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pdserve.request import BlockHash, BlockId
from pdserve.scheduler.block_pool import BlockPool


def hash_of(name: str) -> BlockHash:
    return BlockHash(name.encode())


def taken(pool: BlockPool, num_blocks: int) -> list[BlockId]:
    blocks = pool.allocate(num_blocks)
    assert blocks is not None
    return blocks


def cached_chain(pool: BlockPool, *names: str) -> list[BlockId]:
    """Blocks that hold the prefixes `names`, parents first, held by nobody."""
    blocks = taken(pool, len(names))
    for name, block in zip(names, blocks, strict=True):
        pool.publish(hash_of(name), block)
    pool.release(blocks)
    return blocks


def test_blocks_are_given_out_once_until_they_are_released() -> None:
    pool = BlockPool(4)
    first, second = taken(pool, 3), taken(pool, 1)
    assert sorted(first + second) == [0, 1, 2, 3]
    assert (pool.num_held, pool.num_available) == (4, 0)
    pool.check_integrity([first, second])
    pool.release(first)
    assert (pool.num_held, pool.num_available) == (1, 3)
    pool.check_integrity([second])


def test_too_many_blocks_are_refused_whole() -> None:
    pool = BlockPool(4)
    assert pool.allocate(5) is None
    assert pool.num_available == 4


def test_what_must_be_left_is_left() -> None:
    pool = BlockPool(4)
    assert pool.allocate(3, leaving=2) is None
    assert pool.allocate(2, leaving=2) is not None


def test_a_shared_block_is_held_until_its_last_holder_releases_it() -> None:
    pool = BlockPool(2)
    blocks = taken(pool, 1)
    pool.hold(blocks)
    pool.release(blocks)
    assert pool.num_held == 1
    pool.release(blocks)
    assert pool.num_held == 0


def test_a_released_prefix_is_found_again_with_its_content() -> None:
    pool = BlockPool(4)
    blocks = cached_chain(pool, "a", "b")
    assert (pool.num_held, pool.num_cached) == (0, 2)
    generations = [pool.generation(block) for block in blocks]
    found = pool.longest_prefix([hash_of("a"), hash_of("b"), hash_of("c")])
    pool.hold(found)
    assert found == blocks
    assert generations == [pool.generation(block) for block in blocks]
    assert (pool.num_held, pool.num_cached) == (2, 0)
    pool.check_integrity([found])


def test_free_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached = cached_chain(pool, "a", "b")
    assert not set(taken(pool, 2)) & set(cached)
    assert pool.num_cached == 2


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(3)
    a, b, c = (cached_chain(pool, name)[0] for name in "abc")
    pool.hold([a])
    pool.release([a])
    assert taken(pool, 3) == [b, c, a]


def test_leaves_are_evicted_before_their_parents() -> None:
    pool = BlockPool(3)
    blocks = cached_chain(pool, "a", "b", "c")
    assert taken(pool, 2) == [blocks[2], blocks[1]]
    assert pool.longest_prefix([hash_of(name) for name in "abc"]) == blocks[:1]


def test_a_parent_shared_by_two_outlives_both_their_leaves() -> None:
    pool = BlockPool(3)
    parent, leaf = cached_chain(pool, "a", "b")
    pool.hold([parent, leaf])
    (other,) = taken(pool, 1)
    pool.publish(hash_of("c"), other)
    pool.hold([parent])
    pool.release([parent, leaf])
    pool.release([parent, other])
    assert taken(pool, 3) == [leaf, other, parent]


def test_an_evicted_prefix_is_found_no_more() -> None:
    pool = BlockPool(1)
    cached_chain(pool, "a")
    taken(pool, 1)
    assert pool.longest_prefix([hash_of("a")]) == []


def test_a_generation_rises_when_a_block_is_given_out_anew_and_only_then() -> None:
    pool = BlockPool(1)
    (block,) = taken(pool, 1)
    generation = pool.generation(block)
    pool.hold([block])
    pool.publish(hash_of("a"), block)
    pool.release([block, block])
    pool.hold([block])
    assert pool.generation(block) == generation
    pool.release([block])
    taken(pool, 1)
    assert pool.generation(block) == generation + 1


def test_a_block_released_too_often_is_our_fault() -> None:
    pool = BlockPool(1)
    blocks = taken(pool, 1)
    pool.release(blocks)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(blocks)


def test_a_block_nobody_holds_is_not_published() -> None:
    with pytest.raises(AssertionError, match="nobody holds"):
        BlockPool(1).publish(hash_of("a"), BlockId(0))


def lose_a_reference(pool: BlockPool) -> None:
    pool._references[0] = 0


def free_a_held_block(pool: BlockPool) -> None:
    pool._free.append(BlockId(0))


def free_a_block_twice(pool: BlockPool) -> None:
    pool._free.append(pool._free[0])


def free_a_cached_block(pool: BlockPool) -> None:
    pool._free.append(BlockId(1))


def lose_a_free_block(pool: BlockPool) -> None:
    pool._free.pop()


def forget_what_a_cached_block_holds(pool: BlockPool) -> None:
    pool._prefixes.forget(BlockId(1))


def let_a_free_block_be_found(pool: BlockPool) -> None:
    pool._prefixes.publish(hash_of("b"), pool._free[0])


def break_the_index(pool: BlockPool) -> None:
    pool._prefixes._block_by_hash.clear()


@pytest.mark.parametrize(
    ("corrupt", "message"),
    [
        (lose_a_reference, "1 holders"),
        (free_a_held_block, "a held block can be given out"),
        (free_a_block_twice, "free twice"),
        (free_a_cached_block, "free and cached"),
        (lose_a_free_block, "in no set"),
        (forget_what_a_cached_block_holds, "holds no known prefix"),
        (let_a_free_block_be_found, "a free block holds a known prefix"),
        (break_the_index, None),
    ],
)
def test_check_integrity_catches(corrupt: Callable[[BlockPool], None], message: str | None) -> None:
    pool = BlockPool(4)  # block 0 held, block 1 cached, blocks 2 and 3 free
    held = taken(pool, 1)
    assert held + cached_chain(pool, "a") == [0, 1]
    pool.check_integrity([held])
    corrupt(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity([held])

"""The choice among peers, in numbers."""

from __future__ import annotations

from decode_node.choice import Candidate, choose
from pdserve.engine.prefix_memory import MAX_PREFIX_BLOCKS, PrefixMemory, prefix_hashes

BLOCK_SIZE = 4


def prompt(length: int, seed: int = 0) -> list[int]:
    return [seed + position for position in range(length)]


def test_without_a_known_prefix_the_peer_with_the_fewest_queued_tokens_is_chosen() -> None:
    assert choose([Candidate(3000), Candidate(1000), Candidate(2000)]) == 1


def test_equal_peers_are_taken_in_order() -> None:
    assert choose([Candidate(7), Candidate(7)]) == 0


def test_a_known_prefix_draws_the_prompt_until_the_queue_costs_more_than_the_hit_saves() -> None:
    def chosen(queued: int) -> int:
        return choose([Candidate(1000), Candidate(1000 + queued, num_known_tokens=640)])

    assert [chosen(queued) for queued in (0, 639, 640, 641)] == [1, 1, 1, 0]


def test_two_hits_are_weighed_by_their_difference() -> None:
    short, long = Candidate(100, num_known_tokens=128), Candidate(500, num_known_tokens=512)
    assert choose([short, long]) == 0  # 384 more saved, 400 more to wait for
    assert choose([short, Candidate(483, num_known_tokens=512)]) == 1


def test_a_peer_without_room_is_the_last_resort_whatever_it_knows() -> None:
    full = Candidate(0, num_known_tokens=1000, has_room=False)
    assert choose([full, Candidate(5000)]) == 1
    assert choose([Candidate(10, has_room=False), full]) == 1


def test_only_whole_blocks_have_a_name() -> None:
    assert [len(prefix_hashes(prompt(length), BLOCK_SIZE)) for length in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_a_blocks_name_speaks_for_all_tokens_before_it() -> None:
    one, other = prompt(12), prompt(12)
    other[0] += 1
    assert set(prefix_hashes(one, BLOCK_SIZE)).isdisjoint(prefix_hashes(other, BLOCK_SIZE))
    other = [*one[:8], 99, 99, 99, 99]
    assert prefix_hashes(one, BLOCK_SIZE)[:2] == prefix_hashes(other, BLOCK_SIZE)[:2]


def test_hashing_ends_where_the_choice_no_longer_changes() -> None:
    assert len(prefix_hashes(prompt(BLOCK_SIZE * (MAX_PREFIX_BLOCKS + 5)), BLOCK_SIZE)) == MAX_PREFIX_BLOCKS


def test_the_longest_known_beginning_counts() -> None:
    memory = PrefixMemory(num_blocks=100)
    memory.remember(prefix_hashes(prompt(8), BLOCK_SIZE))
    assert memory.num_known(prefix_hashes(prompt(16), BLOCK_SIZE)) == 2
    assert memory.num_known(prefix_hashes(prompt(5), BLOCK_SIZE)) == 1
    assert memory.num_known(prefix_hashes(prompt(16, seed=1), BLOCK_SIZE)) == 0


def test_no_more_is_remembered_than_the_peers_pool_holds_and_the_oldest_goes_first() -> None:
    memory = PrefixMemory(num_blocks=4)
    old, new = prefix_hashes(prompt(12), BLOCK_SIZE), prefix_hashes(prompt(8, seed=50), BLOCK_SIZE)
    memory.remember(old)
    memory.remember(new)
    assert memory.num_known(new) == 2
    assert memory.num_known(old) == 2  # of three: the last block went, as its parents are of use without it


def test_a_prefix_in_use_is_not_forgotten() -> None:
    memory = PrefixMemory(num_blocks=4)
    kept, other = prefix_hashes(prompt(8), BLOCK_SIZE), prefix_hashes(prompt(8, seed=50), BLOCK_SIZE)
    memory.remember(kept)
    memory.remember(other)
    memory.remember(kept)
    memory.remember(prefix_hashes(prompt(8, seed=90), BLOCK_SIZE))
    assert (memory.num_known(kept), memory.num_known(other)) == (2, 0)

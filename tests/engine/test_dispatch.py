"""Which data-parallel rank gets a request."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.engine.dispatch import PrefixAffinity, RoundRobin, least_kv, shortest_queue
from pdserve.request import RequestId, SamplingParams, TokenRequest

BLOCK_SIZE = 4


@dataclass(frozen=True)
class Known:
    number: int
    num_live: int = 0
    num_held_tokens: int = 0


def request(*prompt: int) -> TokenRequest:
    return TokenRequest(RequestId("r"), prompt, SamplingParams(1))


def test_the_shortest_queue_counts_requests_then_tokens_then_takes_the_first() -> None:
    assert shortest_queue(request(1), [Known(0, 3, 1), Known(1, 2, 900), Known(2, 2, 800)]) == 2
    assert shortest_queue(request(1), [Known(0, 2, 5), Known(1, 2, 5)]) == 0


def test_least_kv_counts_tokens_first() -> None:
    assert least_kv(request(1), [Known(0, 1, 900), Known(1, 9, 100)]) == 1
    assert least_kv(request(1), [Known(0, 2, 100), Known(1, 1, 100)]) == 1


def test_round_robin_takes_each_in_turn_and_skips_ranks_that_are_full() -> None:
    turn = RoundRobin()
    three = [Known(0), Known(1), Known(2)]
    assert [turn(request(1), three) for _ in range(4)] == [0, 1, 2, 0]
    assert turn(request(1), [Known(2)]) == 2


def test_a_known_beginning_draws_a_prompt_unless_that_rank_has_more_to_do_than_the_hit_saves() -> None:
    choose = PrefixAffinity(num_ranks=2, num_blocks=100, block_size=BLOCK_SIZE)
    beginning = tuple(range(40))
    idle = [Known(0), Known(1)]
    assert choose(request(*beginning, 1), idle) == 0
    assert choose(request(*beginning, 2), [Known(0, 1, 39), Known(1)]) == 0  # 40 tokens saved, 39 in the way
    assert choose(request(*beginning, 3), [Known(0, 1, 41), Known(1)]) == 1
    # From now on both know it.
    assert choose(request(*beginning, 4), [Known(0, 1, 41), Known(1, 1, 40)]) == 1


def test_other_beginnings_go_by_what_is_held() -> None:
    choose = PrefixAffinity(num_ranks=2, num_blocks=100, block_size=BLOCK_SIZE)
    assert choose(request(*range(40)), [Known(0), Known(1)]) == 0
    assert choose(request(*range(100, 140)), [Known(0, 1, 10), Known(1, 1, 9)]) == 1

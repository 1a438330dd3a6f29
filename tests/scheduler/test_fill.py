"""The fill condition: which votes it withholds, for how long, and that it shapes votes alone."""

from __future__ import annotations

from pdserve.request import DECODE_ONLY, PREFILL_ONLY
from pdserve.scheduler.fill import FillCondition
from tests.scheduler.group import Group
from tests.scheduler.world import World, world_of


def streaming(**numbers: int) -> World:
    """A rank that decodes, with F = 8 waiting tokens as a full round unless told otherwise."""
    world = world_of(**{"fill_tokens": 8, "num_blocks": 100, "prefill_watermark": 9, **numbers})
    world.submit("stream", [7] * 4, 50)
    world.round()
    return world


def votes(world: World, rounds: int) -> list[bool]:
    """The vote published after each of some closed rounds."""
    published = []
    for _ in range(rounds):
        world.plan(allow_prefill=False)
        published.append(world.scheduler.probe_prefill_gate().vote)
        if world.outstanding is not None:
            world.run()
    return published


def test_a_waiting_fill_of_exactly_f_votes_and_one_token_less_does_not() -> None:
    world = streaming()
    world.submit("a", range(20, 27))
    assert votes(world, 1) == [False]
    world.submit("b", [90])
    assert votes(world, 1) == [True]


def test_the_wish_itself_knows_nothing_of_the_fill() -> None:
    world = streaming()
    world.submit("a", [90])
    assert votes(world, 1) == [False]
    assert world.scheduler.probe_prefill_gate().wants_prefill


def test_29_rounds_are_held_and_the_30th_votes_until_prefill_runs() -> None:
    world = streaming(fill_max_holds=30, max_batch_size=8)
    world.submit("a", [90])
    assert votes(world, 33) == [False] * 29 + [True] * 4
    world.round()
    world.submit("b", [91])
    assert votes(world, 2) == [False, False], "the count starts again after a prefill"


def test_without_decodes_nothing_is_protected_and_anything_votes() -> None:
    world = world_of(fill_tokens=8)
    world.submit("a", [90])
    assert votes(world, 1) == [True]


def test_a_resident_chunk_always_votes() -> None:
    world = streaming(max_batch_size=8)
    world.submit("long", range(20, 50), 4)
    world.round()
    assert votes(world, 1) == [True]


def test_the_probe_alone_counts_nothing() -> None:
    world = streaming(fill_max_holds=3)
    world.submit("a", [90])
    for _ in range(20):
        assert not world.scheduler.probe_prefill_gate().vote
    assert votes(world, 3) == [False, False, True]


def test_what_could_not_start_now_is_no_fill_and_holds_nothing() -> None:
    """No slot is free: the vote is 0 for that, not for the fill, and the count stands still."""
    world = streaming(max_batch_size=1, fill_max_holds=3)
    world.submit("a", range(20, 36))
    assert votes(world, 8) == [False] * 8
    assert world.scheduler._planner._fill is not None
    assert world.scheduler._planner._fill._num_holds == 0


def test_a_prefix_hit_is_not_fill() -> None:
    world = streaming(max_batch_size=8)
    world.submit("warm", range(20, 32), 1)
    world.rounds(2)
    world.submit("a", range(20, 33))
    assert votes(world, 1) == [False], "12 of its 13 tokens are cached"


def test_a_prompt_counts_at_most_one_rounds_budget_and_the_sum_no_more_than_f() -> None:
    world = streaming(fill_tokens=16)
    world.submit("a", range(20, 60), 4)
    assert world.scheduler._planner._waiting_tokens == 16
    assert votes(world, 1) == [True]


def test_prompts_of_other_routes_are_not_counted() -> None:
    world = streaming(max_batch_size=8, max_outstanding_transfers=1)
    world.submit("p", range(20, 36), 4, route=PREFILL_ONLY)
    world.submit("d", range(40, 56), 4, route=DECODE_ONLY)
    world.submit("e", range(60, 76), 4, route=DECODE_ONLY)
    assert world.scheduler._planner._waiting_tokens == 0


def test_a_rank_under_its_fill_joins_a_window_that_others_opened() -> None:
    group = Group(2, attempt=2, any_rank=4, fill_tokens=8)
    for rank in group.ranks:
        rank.submit("stream", [7] * 4, 50)
    group.round()
    group.ranks[0].submit("full", range(20, 36))
    group.ranks[1].submit("small", [90])
    plans = group.round()
    while not any(plan.num_extends for plan in plans):
        plans = group.round()
    assert [plan.num_extends for plan in plans] == [1, 1]


def test_the_counter_goes_back_when_the_fill_is_reached_and_when_nothing_decodes() -> None:
    for waiting_tokens, has_decode_work in ((8, True), (3, False)):
        fill = FillCondition(8, 3)
        for _ in range(2):
            fill.on_round(3, has_decode_work=True, wants_prefill=True)
        fill.on_round(waiting_tokens, has_decode_work=has_decode_work, wants_prefill=True)
        fill.on_round(3, has_decode_work=True, wants_prefill=True)
        assert not fill.is_ready(3, has_decode_work=True), "one hold since"

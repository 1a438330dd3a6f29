"""How long a decode node waits for a peer that says nothing, or nothing new."""

from __future__ import annotations

import pytest

from decode_node.handoff import SILENCE_S
from decode_node.patience import Patience
from pdserve.request import BlockId, LeaseId
from pdserve.rpc.handoff import Accepted, ChunkReady, Computing, FirstToken, Queued, Released, ToDecode

NO_PROGRESS_S = 60.0


class World:
    """A hand-set clock, and a peer that says something each second."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.no_progress_s = NO_PROGRESS_S
        self.patience = Patience(lambda: self.no_progress_s, SILENCE_S, clock=lambda: self.now_s)

    def hear(self, *said: ToDecode, every_s: float = 1.0) -> str | None:
        """Why the peer was given up, if it was."""
        for word in said:
            self.now_s += every_s
            if (why := self.patience.why_over()) is not None:
                return why
            self.patience.on_word(word)
        return self.patience.why_over()


@pytest.fixture
def world() -> World:
    return World()


def test_a_peer_that_says_nothing_at_all_is_left_after_a_few_seconds(world: World) -> None:
    world.now_s = SILENCE_S - 0.1
    assert world.patience.why_over() is None
    assert world.patience.ends_s == SILENCE_S
    world.now_s = SILENCE_S
    assert world.patience.why_over() == "not a word for 8 s"


def test_a_peer_that_says_the_same_over_and_over_is_left_at_the_deadline(world: World) -> None:
    for word in (Queued(3, 700), Computing(128, 700)):
        world.hear(word)
        start_s = world.now_s
        assert world.hear(*[word] * 100) == "no progress for 60 s"
        assert world.now_s == start_s + NO_PROGRESS_S
        world.patience.on_news()


def test_a_prompt_behind_a_very_long_one_never_runs_out_of_time(world: World) -> None:
    """Its place in the queue stays the same for ten minutes; the rank's work on the other is what changes."""
    assert world.hear(*(Queued(1, 512 * (second // 20)) for second in range(600))) is None


def test_a_prompt_whose_chunks_give_way_to_others_never_runs_out_of_time(world: World) -> None:
    world.hear(Accepted(LeaseId("a"), 1))
    assert world.hear(*(Computing(128, 512 * (second // 20)) for second in range(600))) is None


def test_after_the_first_token_work_on_others_is_no_excuse(world: World) -> None:
    world.hear(FirstToken(5, num_chunks=1))
    assert world.hear(*(Computing(128, 512 * second) for second in range(600))) == "no progress for 60 s"


def test_chunks_and_what_was_read_are_news(world: World) -> None:
    chunks = [ChunkReady(0, seq, 64 * seq, 64 * seq + 64, (BlockId(1),)) for seq in range(40)]
    assert world.hear(*chunks, every_s=7.0) is None
    world.hear(FirstToken(5, num_chunks=40))
    for second in range(600):
        assert world.hear(Computing(2560)) is None
        if second % 50 == 0:
            world.patience.on_news()


def test_a_peer_that_has_confirmed_has_nothing_more_to_say(world: World) -> None:
    world.hear(FirstToken(5, num_chunks=1), Released(True))
    world.now_s += NO_PROGRESS_S - 1
    assert world.patience.why_over() is None
    world.now_s += 1
    assert world.patience.why_over() == "no progress for 60 s"


def test_a_peer_whose_chunks_turn_out_to_take_longer_is_given_that_time_at_once(world: World) -> None:
    assert world.hear(*[Computing(128, 700)] * 59) is None
    world.no_progress_s = 84.0
    assert world.hear(*[Computing(128, 700)] * 25) is None
    assert world.hear(Computing(128, 700)) == "no progress for 84 s"


def test_time_in_which_we_ourselves_did_not_run_is_not_held_against_the_peer(world: World) -> None:
    """What it said meanwhile is still to be read."""
    world.hear(Queued(0))
    world.now_s += 30.0
    world.patience.on_own_pause()
    assert world.patience.why_over() is None
    assert world.patience.ends_s == world.now_s + SILENCE_S
    world.now_s += SILENCE_S
    assert world.patience.why_over() == "not a word for 8 s"

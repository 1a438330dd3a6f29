"""The two-sided cadence, driven through the real scheduler."""

from __future__ import annotations

import pytest

from pdserve.request import DECODE_ONLY, RequestId
from pdserve.scheduler.cadence import Cadence
from pdserve.scheduler.config import CadenceLimits
from tests.scheduler.world import World, world_of


def letters(world: World, rounds: int) -> str:
    """What each round ran: P, D, M for both, - for nothing."""
    return "".join("-DPM"[2 * bool(plan.prefill) + bool(plan.decode)] for plan in world.rounds(rounds))


def busy(prompt_chunks: int, cadence: CadenceLimits, **numbers: int) -> World:
    """A stream that decodes, beside a prompt of so many chunks."""
    size = {"num_blocks": 500, "max_model_len": 1500, **numbers}
    world = world_of(cadence=cadence, **size)
    world.submit("stream", [7] * 4, 300)
    world.round()
    world.submit("prompt", range(100, 100 + prompt_chunks * 16), 1)
    return world


TRUTH = {None: "PPPPPPPPP", 1: "PDPDPDPDP", 3: "PPDPPPDPP", 8: "PPPPPPPDP"}


@pytest.mark.parametrize("every", TRUTH)
def test_the_first_nine_rounds(every: int | None) -> None:
    """The stream's own prefill is the first of the streak, before the nine that are shown."""
    assert letters(busy(20, CadenceLimits(every)), 9) == (TRUTH[every] if every != 1 else "DPDPDPDPD")


@pytest.mark.parametrize(("every", "num_decodes"), [(8, 7), (16, 3), (4, 14)])
def test_a_prompt_of_58_chunks_lets_through_one_decode_in_n(every: int, num_decodes: int) -> None:
    world = busy(58, CadenceLimits(every))
    ran = ""
    while world.scheduler.counters.prompt_tokens_computed < 4 + 58 * 16:
        ran += letters(world, 1)
    assert ran.count("D") == num_decodes
    assert max(map(len, ran.split("D"))) <= every


def test_797_slots_hold_709_chunks_and_88_decodes() -> None:
    cadence = Cadence(8, 1)
    ran = ""
    for _ in range(797):
        ran += "D" if cadence.owes_decode else "P"
        (cadence.on_decode_round if ran[-1] == "D" else cadence.on_prefill_round)()
    assert (ran.count("P"), ran.count("D")) == (709, 88)
    assert max(map(len, ran.split("D"))) == 8


def test_without_bounds_a_decode_is_never_owed() -> None:
    cadence = Cadence()
    for _ in range(100):
        cadence.on_prefill_round()
    assert not cadence.owes_decode


def test_disabled_is_prefill_first_and_decodes_are_not_asked_beside_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    world = busy(5, CadenceLimits())
    asked: list[str] = []
    admission = world.scheduler._planner._admission
    real = admission.try_decode
    monkeypatch.setattr(admission, "try_decode", lambda request, draft: asked.append("D") or real(request, draft))
    assert letters(world, 7) == "PPPPPDD"
    assert len(asked) == 2, "once in each of the two rounds that decode"


def test_a_decode_that_is_owed_but_cannot_run_stays_owed_and_fires_once_at_its_first_chance() -> None:
    world = world_of(cadence=CadenceLimits(2), num_blocks=200, max_model_len=400)
    world.submit("stream", [7] * 4, 20, route=DECODE_ONLY)
    world.submit("prompt", range(100, 100 + 16 * 12), 1)
    assert letters(world, 5) == "PPPPP", "KV on the wire is no runnable decode"
    world.receive(world.transfer_of("stream"))
    assert letters(world, 6) == "DPPDPP"


def test_an_abort_of_the_only_decode_while_one_is_owed_forces_no_empty_round() -> None:
    world = busy(6, CadenceLimits(1))
    world.abort("stream")
    assert letters(world, 6) == "P" * 6


def test_rounds_without_work_are_empty_and_pure_decodes_go_on() -> None:
    world = world_of(cadence=CadenceLimits(1))
    assert letters(world, 2) == "--"
    world.submit("a", range(4), 4)
    assert letters(world, 5) == "PDDD-"


def test_a_first_chunk_is_not_held_when_no_decode_is_owed() -> None:
    world = world_of(cadence=CadenceLimits(8), num_blocks=100)
    world.submit("stream", range(4), 30)
    assert letters(world, 4) == "PDDD"
    world.submit("late", range(20, 26), 1)
    assert letters(world, 1) == "P"


def test_after_each_chunk_k_decode_rounds_run() -> None:
    assert letters(busy(6, CadenceLimits(1, 3)), 13) == "DDDPDDDPDDDPD"


def test_a_prompt_held_for_its_budget_is_held_no_more() -> None:
    world = busy(8, CadenceLimits(1, 3, hold_budget=7))
    assert letters(world, 18) == "DDDPDDDPDPPPPPP" + "DDD"


def test_holds_are_counted_for_each_prompt_alone() -> None:
    world = busy(8, CadenceLimits(1, 2, hold_budget=4))
    letters(world, 20)
    world.submit("second", range(500, 540), 1)
    assert letters(world, 5) == "PDDPD"


def test_a_mixed_round_with_a_chunk_is_a_prefill_round() -> None:
    world = busy(6, CadenceLimits(1, 2), enable_mixed_batch=1)
    assert letters(world, 7) == "DDMDDMD"


def test_a_prompt_beyond_its_budget_rides_in_each_mixed_round() -> None:
    world = busy(6, CadenceLimits(1, 2, hold_budget=2), enable_mixed_batch=1)
    assert letters(world, 4) == "DDMM"


def test_the_answers_are_the_same_in_any_rhythm() -> None:
    answers = []
    for cadence in (CadenceLimits(), CadenceLimits(1), CadenceLimits(3), CadenceLimits(1, 4, hold_budget=5)):
        world = world_of(cadence=cadence, num_blocks=100)
        for index in range(6):
            world.submit(f"r{index}", [index] * (5 + 7 * index), 9)
            world.rounds(2)
        world.drain()
        answers.append({RequestId(f"r{index}"): world.ended[RequestId(f"r{index}")] for index in range(6)})
    assert all(answer == answers[0] for answer in answers)

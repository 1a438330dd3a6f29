"""Random walks through everything that callers, peers, tiers and policies can do, in any order and at any moment.

The world checks each promise as it goes (see `world.py`): tokens against the direct computation, blocks that may not
be given out yet, who may write where. The walk checks what its policy promises (see `policy.py`). After it all arrivals
stop, everybody does what they owe, and everything has to end within a stated number of rounds with nothing held.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import pytest

from pdserve.request import FUSED
from pdserve.scheduler import state as states
from pdserve.scheduler.state import TABLE, TRANSFER_TABLE, Move, State, TransferMove, TransferState
from tests.scheduler.policy import POLICIES
from tests.scheduler.walk import ROUTES, TIERS, Walk

CASES = list(itertools.product(ROUTES, POLICIES, TIERS))
SEEDS = range(4)
MORE_SEEDS = range(24)  # for what happens seldom: closed rounds above a tier, and a crowd, make prefills give way
STEPS = 300
SOAK_STEPS = 10_000

Moves = Counter[tuple[State, Move] | tuple[TransferState, TransferMove]]


@contextmanager
def counted_moves() -> Iterator[Moves]:
    """Counts each move of a request or a transfer that is made meanwhile."""
    moves: Moves = Counter()
    after, after_transfer = states.after, states.after_transfer

    def count(state: State, move: Move) -> State:
        moves[state, move] += 1
        return after(state, move)

    def count_transfer(state: TransferState, move: TransferMove) -> TransferState:
        moves[state, move] += 1
        return after_transfer(state, move)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(states, "after", count)
        patch.setattr(states, "after_transfer", count_transfer)
        yield moves


@cache
def walked(shape: str, policy: str, tier: str) -> tuple[Counter[str], Moves]:
    """What the walks of one case saw."""
    seen: Counter[str] = Counter()
    with counted_moves() as moves:
        is_seldom = policy == "closed" and tier != "none" and FUSED in ROUTES[shape]
        for seed in MORE_SEEDS if is_seldom else SEEDS:
            seen.update(Walk(seed, shape, policy, tier).walk(STEPS))
    return seen, moves


@pytest.mark.parametrize(("shape", "policy", "tier"), CASES)
def test_a_walk_keeps_every_promise_and_ends_with_nothing_held(shape: str, policy: str, tier: str) -> None:
    walked(shape, policy, tier)


@pytest.mark.soak
@pytest.mark.parametrize(("shape", "policy", "tier"), CASES)
def test_a_long_walk_keeps_every_promise_and_ends_with_nothing_held(shape: str, policy: str, tier: str) -> None:
    Walk(1, shape, policy, tier).walk(SOAK_STEPS)


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("shape", ["prefill", "decode"])
def test_routes_with_a_remote_side_plan_the_same_whatever_they_are_allowed(shape: str, tier: str) -> None:
    for seed in SEEDS:
        walks = [Walk(seed, shape, "none", tier, share_closed=share, keeps_routes=True) for share in (0.0, 0.5, 1.0)]
        for walk in walks:
            walk.walk(STEPS)
        plans = [list(map(repr, walk.plans)) for walk in walks]  # by their text: an error is equal only to itself
        assert not any(len(set(versions)) > 1 for versions in zip(*plans, strict=True))


def test_the_walks_make_every_move_often() -> None:
    moves: Moves = Counter()
    for case in CASES:
        moves.update(walked(*case)[1])
    assert set(moves) == {*TABLE, *TRANSFER_TABLE}
    assert not {move: count for move, count in moves.items() if count < 100}


def test_the_walks_see_every_branch_and_a_crowded_pool_often() -> None:
    seen: Counter[str] = Counter()
    for case in CASES:
        seen.update(walked(*case)[0])
    assert seen["crowded steps"] > 0.1 * seen["steps"], seen
    expected = {"finished", "sent off", "aborted", "failed", "refused", "idle", "stray", "prefix_hit_tokens"}
    expected |= {"received", "received, unwanted", "failed transfers", "failed, unwanted", "late writes", "quiet"}
    expected |= {"tried again", "tried again, unwanted"}
    expected |= {"released", "revoked", "reroutes", "retractions", "restores", "host_hit_tokens", "copies told late"}
    expected |= {"write-backs", "fetched", "fetched late", "late fetches", "fetched blocks", "stores"}
    expected |= {f"gate {branch}" for branch in BRANCHES}
    expected |= {"gate reset by extend", "gate reset by idle", "gate counts"}
    assert not {what: seen[what] for what in expected if seen[what] < 100}


BRANCHES = [
    "closed by the bound",
    "ANY: any",
    "ANY: closed",
    "ANY and ALL: any",
    "ANY and ALL: closed",
    "ALL at 0: all",
    "ALL at 0: idle",
    "ALL at 0: closed",
    "ALL: all",
    "ALL: closed",
    "between: closed",
]

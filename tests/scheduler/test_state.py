"""The state tables, exhausted, and the diagrams that are drawn of them."""

from __future__ import annotations

import enum
import itertools
import re
from collections.abc import Mapping
from typing import Any

import pytest

from pdserve.errors import InternalError
from pdserve.scheduler import state as state_module
from pdserve.scheduler.state import (
    HOLDS_BLOCKS,
    HOLDS_IMAGE,
    TABLE,
    TRANSFER_TABLE,
    Move,
    State,
    TransferMove,
    TransferState,
    after,
    after_transfer,
)


@pytest.mark.parametrize(("state", "move"), list(itertools.product(State, Move)), ids=lambda member: member.name)
def test_every_move_of_a_request_is_in_the_table_or_an_error_that_names_both(state: State, move: Move) -> None:
    if (state, move) in TABLE:
        assert after(state, move) is TABLE[state, move]
    else:
        with pytest.raises(InternalError, match=rf"{move.name}.*{state.name}"):
            after(state, move)


@pytest.mark.parametrize(
    ("state", "move"), list(itertools.product(TransferState, TransferMove)), ids=lambda member: member.name
)
def test_every_move_of_a_transfer_is_in_the_table_or_an_error_that_names_both(
    state: TransferState, move: TransferMove
) -> None:
    if (state, move) in TRANSFER_TABLE:
        assert after_transfer(state, move) is TRANSFER_TABLE[state, move]
    else:
        with pytest.raises(InternalError, match=rf"{move.name}.*{state.name}"):
            after_transfer(state, move)


def drawn(heading: str) -> dict[tuple[str, str], str]:
    """The arrows of the diagram under `heading` in the module's docstring, names in upper case."""
    assert state_module.__doc__ is not None
    text = state_module.__doc__.split(heading)[1].split("\n\n")[1]
    arrows = {}
    for line in text.splitlines():
        source = line.split()[0]
        for move, target in re.findall(r"──(\w+)──▶ (\w+)", line):
            arrows[source, move.upper()] = target
    return arrows


def named(table: Mapping[tuple[Any, Any], enum.Enum]) -> dict[tuple[str, str], str]:
    return {(source.name, move.name): target.name for (source, move), target in table.items()}


def test_the_diagrams_show_exactly_the_tables() -> None:
    assert drawn("A request.") == named(TABLE)
    assert drawn("A transfer:") == named(TRANSFER_TABLE)


def reachable(start: State) -> set[State]:
    found = {start}
    while new := {target for (source, _), target in TABLE.items() if source in found} - found:
        found |= new
    return found


def test_every_state_can_be_reached_and_left_for_the_end() -> None:
    assert reachable(State.WAITING) == set(State)
    assert all(State.FINISHED in reachable(state) for state in State)
    assert not [move for source, move in TABLE if source is State.FINISHED]


def test_every_state_but_those_of_the_queue_of_an_image_and_of_the_end_holds_blocks() -> None:
    assert set(State) - {State.WAITING, State.FETCHING, State.RETRACTED, State.FINISHED} == HOLDS_BLOCKS


def test_an_image_is_held_until_it_is_back_on_the_device() -> None:
    assert {State.RETRACTED, State.RESTORING} == HOLDS_IMAGE
    assert all(
        source in HOLDS_IMAGE or move is Move.RETRACT for (source, move), to in TABLE.items() if to in HOLDS_IMAGE
    )


def test_a_transfer_is_given_up_only_through_draining() -> None:
    assert [move for (_, move), target in TRANSFER_TABLE.items() if target is TransferState.QUIET] == [
        TransferMove.COMMIT,
        TransferMove.SETTLE,
    ]
    assert not [move for source, move in TRANSFER_TABLE if source is TransferState.QUIET]

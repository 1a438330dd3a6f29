"""A lease in several parts: all of them stand, all of them are announced, all of them vouch, or it does not count."""

from __future__ import annotations

from itertools import permutations

import pytest

from prefill_node.parts import Parts


def test_a_lease_stands_once_it_does_in_every_part() -> None:
    parts = Parts(3)
    assert [parts.open(part) for part in (2, 0, 1)] == [False, False, True]


def test_as_much_of_the_prompt_is_done_as_is_in_every_part() -> None:
    parts = Parts(2)
    parts.announce(0, 64)
    parts.announce(0, 100)
    assert parts.num_tokens_done == 0
    assert not parts.have_announced(2)
    parts.announce(1, 64)
    assert parts.num_tokens_done == 64
    parts.announce(1, 100)
    assert parts.num_tokens_done == 100
    assert parts.have_announced(2)
    assert not parts.have_announced(3)


@pytest.mark.parametrize("answers", [(True, True, True), (True, True, False), (False, False, False)])
def test_the_whole_was_pinned_only_where_every_part_was(answers: tuple[bool, ...]) -> None:
    for order in permutations(range(3)):
        parts = Parts(3)
        *first, last = [parts.answer(part, is_valid=answers[part]) for part in order]
        assert first == [None, None]
        assert last is all(answers)

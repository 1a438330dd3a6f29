"""Tokens made from lengths and names."""

from __future__ import annotations

import pytest

from pdserve.errors import InvalidRequest
from pdserve.sim.prompts import ANSWER_TOKEN, prompt_tokens
from tests.sim.worlds import asked


def test_equal_names_are_equal_tokens_and_the_last_piece_is_cut() -> None:
    first, second = (prompt_tokens(asked(n, prompt=100, hash_ids=(5, 6 + n))) for n in range(2))
    assert len(first) == len(second) == 100
    assert first[:64] == second[:64]
    assert set(first[64:]).isdisjoint(second[64:])


def test_a_prompt_without_names_is_like_no_other_and_like_no_answer() -> None:
    prompts = [set(prompt_tokens(asked(n))) for n in range(3)] + [set(prompt_tokens(asked(3, hash_ids=(0,))))]
    assert len(set.union(*prompts)) == 4
    assert ANSWER_TOKEN not in set.union(*prompts)


@pytest.mark.parametrize(("names", "message"), [((1,), "name 1 pieces of 64 tokens"), ((1, -1), "hold -1")])
def test_names_that_make_no_prompt_are_refused(names: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        prompt_tokens(asked(0, prompt=100, hash_ids=names))

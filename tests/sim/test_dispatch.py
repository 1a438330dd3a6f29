"""The least loaded of many, beside a search through all of them."""

from __future__ import annotations

from random import Random

import pytest

from pdserve.sim.dispatch import LeastLoaded


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 33])
def test_it_is_always_the_first_of_those_with_the_least(count: int) -> None:
    random = Random(count)
    loads, tree, taken = [0] * count, LeastLoaded(count), []
    for _ in range(500):
        if taken and random.random() < 0.45:
            index, amount = taken.pop(random.randrange(len(taken)))
            tree.give_back(index, amount)
            loads[index] -= amount
        else:
            amount = random.randint(1, 9)
            index = tree.take(amount)
            assert index == loads.index(min(loads))
            loads[index] += amount
            taken.append((index, amount))
    assert [tree.load(index) for index in range(count)] == loads

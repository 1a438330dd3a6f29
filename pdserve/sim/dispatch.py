"""Who has the least to do, of thousands: a tree of minima over their loads."""

from __future__ import annotations


class LeastLoaded:
    """count places with nothing to do at first. Of equals the one with the lowest index is chosen."""

    def __init__(self, count: int) -> None:
        assert count >= 1, f"{count} places"
        self._num_leaves = 1 << (count - 1).bit_length()
        # _best[n] is the (load, index) with the least load below node n; leaves are the second half.
        self._best = [(0, index) for index in range(-self._num_leaves, self._num_leaves)]
        for index in range(count, self._num_leaves):
            self._best[self._num_leaves + index] = (1 << 62, index)
        for node in range(self._num_leaves - 1, 0, -1):
            self._best[node] = min(self._best[2 * node], self._best[2 * node + 1])

    def take(self, amount: int) -> int:
        """The index of the place with the least load, which has `amount` more now."""
        index = self._best[1][1]
        self._add(index, amount)
        return index

    def give_back(self, index: int, amount: int) -> None:
        """The place has `amount` less to do."""
        self._add(index, -amount)

    def load(self, index: int) -> int:
        return self._best[self._num_leaves + index][0]

    def _add(self, index: int, amount: int) -> None:
        node = self._num_leaves + index
        self._best[node] = (self._best[node][0] + amount, index)
        node //= 2
        while node:
            left, right = self._best[2 * node], self._best[2 * node + 1]
            self._best[node] = left if left <= right else right
            node //= 2

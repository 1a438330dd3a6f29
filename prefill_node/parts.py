"""What the processes of a rank say about one lease, each for its part of every block: when it counts for the whole."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.engine.messages import FromTransport


@dataclass(frozen=True, slots=True)
class FromPart:
    """Into a stream's inbox. part: the process of the rank whose transport says it."""

    part: int
    message: FromTransport


class Parts:
    """num_parts: processes of the rank, in their order."""

    def __init__(self, num_parts: int) -> None:
        self._opened: set[int] = set()
        self._answers: dict[int, bool] = {}
        self._num_chunks = [0] * num_parts
        self._ends = [0] * num_parts

    @property
    def num_tokens_done(self) -> int:
        """Of the prompt, in every part."""
        return min(self._ends)

    def open(self, part: int) -> bool:
        """Whether the lease stands for every part now."""
        self._opened.add(part)
        return len(self._opened) == len(self._ends)

    def announce(self, part: int, end_token: int) -> None:
        self._num_chunks[part] += 1
        self._ends[part] = end_token

    def have_announced(self, num_chunks: int) -> bool:
        """Every one of them, so many."""
        return all(count == num_chunks for count in self._num_chunks)

    def answer(self, part: int, *, is_valid: bool) -> bool | None:
        """Whether the whole was pinned all the time; None until every part has said so of itself."""
        self._answers[part] = is_valid
        return all(self._answers.values()) if len(self._answers) == len(self._ends) else None

"""The cells of the table of speeds: which requests each is made of, and what its speed is once they were heard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.listening import Call, Heard, unique_prompt


class NeverTogether(Exception):
    """Answers whose speed was to be taken while all were written were not."""


@dataclass(frozen=True, slots=True)
class Cell:
    """num_streams answers of num_tokens each, after prompts of num_prompt_tokens that have nothing in common.

    One stream of one token measures its prompt.
    """

    name: str
    num_streams: int
    num_prompt_tokens: int
    num_tokens: int

    @property
    def is_of_prompt(self) -> bool:
        return self.num_tokens == 1

    @property
    def total_tokens(self) -> int:
        return self.num_streams * (self.num_prompt_tokens + self.num_tokens)

    def calls(self, text: Sequence[int], repeat: int) -> list[Call]:
        """text: the tokens that prompts are drawn from."""
        return [
            Call(number, unique_prompt(text, self.num_prompt_tokens, f"{self.name} {repeat} {number}"), self.num_tokens)
            for number in range(self.num_streams)
        ]

    def tokens_per_s(self, heard: Sequence[Heard]) -> float:
        """Of the prompt, or of all answers together while every one of them was being written.

        Raises NeverTogether where the first had ended before the last began.
        """
        if self.is_of_prompt:
            return self.num_prompt_tokens / heard[0].ttft_s
        begin_s = max(answer.arrivals_s[0] for answer in heard)
        end_s = min(answer.arrivals_s[-1] for answer in heard)
        if begin_s >= end_s:
            raise NeverTogether(f"the first of {len(heard)} answers had ended before the last began")
        num_tokens = sum(begin_s < at_s <= end_s for answer in heard for at_s in answer.arrivals_s)
        return num_tokens / (end_s - begin_s)


# How long answers are: prompts end one after the other, and all answers have to go on together for a while.
SHORT, MANY, LONG = 96, 256, 32
CELLS = (
    Cell("prefill 1k", 1, 1024, 1),
    Cell("prefill 4k", 1, 4096, 1),
    Cell("decode 1", 1, 64, SHORT),
    Cell("decode 8", 8, 64, SHORT),
    Cell("decode 32", 32, 64, MANY),
    Cell("decode 1 at 4k", 1, 4096, LONG),
    Cell("decode 8 at 4k", 8, 4096, 2 * LONG),
    Cell("decode 1 at 7k", 1, 7168, LONG),
    Cell("decode 8 at 7k", 8, 7168, 2 * LONG),
)
QUICK = ("prefill 1k", "prefill 4k", "decode 1", "decode 8", "decode 32")

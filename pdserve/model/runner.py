"""What the round loop asks of a model: forget and load slots, run one round.

Tensor-parallel ranks run the same rounds; the first, whose ModelRunner draws the tokens, leads:

    leader    start ─▶ execute(plan) ─────────────────────▶ next round
                          ║ collectives          │ tokens
    follower  start ─▶ compute(plan) ───────▶ append(tokens) ─▶ next round
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pdserve.request import RequestId, TokenLogprobs, TokenRequest
from pdserve.scheduler.plan import RoundPlan, SlotStart


@dataclass(frozen=True, slots=True)
class RoundResult:
    """tokens: one a row of RoundPlan.sampled_rows, in order. logprobs: by index in tokens, for rows that asked.

    prompt_logprobs: for prefill rows that asked, the entries this row added. A row over prompt tokens [start, end)
    adds those of tokens start + 1 .. end, of which the token at `num_prompt_tokens` does not exist: so concatenated
    over a prompt's chunks they are one entry a prompt token from the second on.
    """

    tokens: Sequence[int]
    logprobs: Mapping[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: Mapping[RequestId, tuple[TokenLogprobs, ...]] = field(default_factory=dict)


class ModelRunner(Protocol):
    """Owned by the loop thread. Keeps the tokens, block table and sampling state of each slot between rounds."""

    def start(self, start: SlotStart, request: TokenRequest) -> None:
        """The slot now belongs to `request`; whoever had it is forgotten. Called before the round that needs it."""

    def execute(self, plan: RoundPlan) -> RoundResult:
        """One forward over the plan's rows (prefill rows first), then one token for each row that samples.

        A row's input tokens are known here: the prompt, the forced output, and what earlier rounds drew.
        """

    def idle(self) -> None:
        """Take part in a round of the group in which this rank has no rows."""


class Follower(Protocol):
    """A tensor-parallel rank other than the first. Owned by its loop thread.

    Every call follows one of the leader's, in the same order, with what the leader's was given.
    """

    def start(self, start: SlotStart, request: TokenRequest) -> None:
        """As ModelRunner.start."""

    def compute(self, plan: RoundPlan) -> None:
        """This rank's part of the leader's `execute`, which cannot end without it."""

    def append(self, tokens: Sequence[int]) -> None:
        """The tokens of the leader's RoundResult for the last plan computed, before the next."""

    def idle(self) -> None:
        """As ModelRunner.idle."""

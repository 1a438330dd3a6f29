"""What the round loop asks of a model: forget and load slots, run one round."""

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

"""Is an answer right? Compared with a fused node's, token by token."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdserve.bench.chaos.requests import HANG_S, Attempted, Kind, Sample
from pdserve.client import AsyncClient
from pdserve.request import TokenLogprobs

# Answers may part where the model holds two tokens for as likely as this. Then rounding, which depends on who shares a
# forward, decides which is the best, or which of them comes first in the order that a token is drawn from.
TIE_LOGPROB = 1e-4
LOGPROB_TOLERANCE = 2e-3


class Answered(enum.Enum):
    """How an answer compares as far as it goes. TIED: parted at a tie of the reference, compared no further."""

    RIGHT = "right"
    TIED = "tied"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Parting:
    """A sample differs from its reference first at this output position, and `other` is what it has there."""

    sample: int
    place: int
    other: int


def compare(attempted: Attempted, reference: Attempted) -> tuple[Answered, list[Parting]]:
    """Without the partings, which a tie may excuse; an answer that did not end is compared as far as it goes."""
    answered, partings = Answered.RIGHT, []
    for number, (mine, right) in enumerate(zip(attempted.samples, reference.samples, strict=True)):
        pairs = enumerate(zip(mine.token_ids, right.token_ids, strict=False))
        place = next((at for at, (ours, theirs) in pairs if ours != theirs), None)
        if place is not None:
            partings.append(Parting(number, place, mine.token_ids[place]))
        elif not _is_same(attempted, mine, right):
            answered = Answered.WRONG
    return answered, partings


def _is_same(attempted: Attempted, mine: Sample, right: Sample) -> bool:
    if len(mine.token_ids) > len(right.token_ids) or not right.text.startswith(mine.text):
        return False
    is_whole = (mine.token_ids, mine.text, mine.finish) == (right.token_ids, right.text, right.finish)
    if attempted.is_complete and not is_whole:
        return False
    return attempted.ask.kind is not Kind.LOGPROBS or _same_logprobs(mine.logprobs, right.logprobs)


async def judge(
    done: Sequence[Attempted], references: Mapping[int, Attempted], referee: AsyncClient
) -> dict[int, Answered]:
    """By number of the request. referee: a fused node, asked how likely the other token was where answers part."""
    verdicts = {}
    for attempted in done:
        reference = references[attempted.ask.number]
        answered, partings = compare(attempted, reference)
        for parting in partings:
            if answered is not Answered.WRONG:
                is_tied = await _is_tied(parting, attempted, reference, referee)
                answered = Answered.TIED if is_tied else Answered.WRONG
        verdicts[attempted.ask.number] = answered
    return verdicts


async def _is_tied(parting: Parting, attempted: Attempted, reference: Attempted, referee: AsyncClient) -> bool:
    """Whether the model holds both tokens for equally likely there."""
    right = reference.samples[parting.sample]
    text = (*attempted.ask.prompt, *right.token_ids[: parting.place], parting.other)
    answer = await referee.generate(
        token_ids=text, max_new_tokens=1, temperature=0.0, prompt_logprobs=0, timeout_s=HANG_S
    )
    assert answer.prompt_logprobs is not None
    theirs = right.logprobs[parting.place].logprob
    return math.isclose(answer.prompt_logprobs[-1].logprob, theirs, abs_tol=TIE_LOGPROB)


def _same_logprobs(mine: Sequence[TokenLogprobs], right: Sequence[TokenLogprobs]) -> bool:
    return all(
        ours.token_id == theirs.token_id
        and math.isclose(ours.logprob, theirs.logprob, abs_tol=LOGPROB_TOLERANCE)
        and all(
            math.isclose(our, their, abs_tol=LOGPROB_TOLERANCE)
            for (_, our), (_, their) in zip(ours.top, theirs.top, strict=False)
        )
        for ours, theirs in zip(mine, right, strict=False)
    )

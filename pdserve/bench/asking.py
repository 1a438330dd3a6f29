"""Sends requests from many streams at once, and compares the answers with reference answers."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pdserve.bench.workload import Ask, Cancel
from pdserve.client import AsyncClient, AsyncStream, GenerateOptions
from pdserve.request import FinishReason, TokenLogprobs

# Answers that part where the reference's two best tokens are closer than this are tied: rounding decides.
TIE_LOGPROB = 1e-3
# What nodes are started with whose answers are compared token by token: tokens that are computed anew as a prompt,
# after a fault, are rounded otherwise than as they were decoded, which shows in bfloat16 KV.
EXACT = {"quantization": "fp32"}
TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class Reply:
    """What one request got. finish: None where its caller gave up. logprobs: with the runner-up, if they were asked."""

    token_ids: tuple[int, ...]
    finish: FinishReason | None
    placement: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()


class Verdict(enum.Enum):
    EQUAL = "equal"
    TIED = "tied"
    DIFFERENT = "different"


def compare(answer: Sequence[int], reference: Reply) -> Verdict:
    """Greedy answers: equal, or parted at a tie of the reference and compared no further, or different."""
    expected = reference.token_ids
    if tuple(answer) == expected:
        return Verdict.EQUAL
    place = next((at for at, (ours, theirs) in enumerate(zip(answer, expected, strict=False)) if ours != theirs), None)
    if place is None:  # one ends where the other goes on
        return Verdict.DIFFERENT
    (_, best), (_, second) = reference.logprobs[place].top[:2]
    return Verdict.TIED if best - second <= TIE_LOGPROB else Verdict.DIFFERENT


async def ask_all(
    address: str,
    asks: Sequence[Ask],
    num_streams: int,
    *,
    gives_up: bool = True,
    with_logprobs: bool = False,
    on_reply: Callable[[], None] = lambda: None,
) -> dict[int, Reply]:
    """Every request's reply by number, `num_streams` of them in the air at a time. gives_up: heed Ask.cancel.

    Raises what a request failed with.
    """
    replies: dict[int, Reply] = {}
    waiting = iter(asks)

    async def work(client: AsyncClient) -> None:
        for ask in waiting:
            replies[ask.number] = await _ask(client, ask, gives_up, with_logprobs)
            on_reply()

    async with AsyncClient(address, timeout_s=TIMEOUT_S, max_attempts=1) as client, asyncio.TaskGroup() as group:
        for _ in range(num_streams):
            group.create_task(work(client))
    return replies


async def _ask(client: AsyncClient, ask: Ask, gives_up: bool, with_logprobs: bool) -> Reply:
    options: GenerateOptions = {
        "token_ids": ask.prompt,
        "max_new_tokens": ask.max_new_tokens,
        "temperature": 0.0,
        "request_id": f"ask-{ask.number}",
    }
    if with_logprobs:
        options |= {"logprobs": True, "top_logprobs": 2}
    cancel = (gives_up and ask.cancel) or Cancel()
    token_ids: list[int] = []
    try:
        async with asyncio.timeout(cancel.after_s), client.stream(**options) as stream:
            return await _read(stream, token_ids, cancel.after_tokens)
    except TimeoutError:
        return Reply(tuple(token_ids), finish=None)


async def _read(stream: AsyncStream, token_ids: list[int], max_tokens: int | None) -> Reply:
    """To the answer's end, or until max_tokens have come."""
    logprobs: list[TokenLogprobs] = []
    finish = None
    async for piece in stream:
        token_ids += piece.token_ids
        logprobs += piece.logprobs
        finish = piece.finish
        if finish is None and max_tokens is not None and len(token_ids) >= max_tokens:
            return Reply(tuple(token_ids), finish=None)
    return Reply(tuple(token_ids), finish, ", ".join(await stream.placements()), tuple(logprobs))


def verdicts(replies: Mapping[int, Reply], references: Mapping[int, Reply]) -> dict[int, Verdict]:
    """Of every finished answer, and of what a caller who gave up had been sent by then."""
    return {number: _verdict(reply, references[number]) for number, reply in replies.items()}


def _verdict(reply: Reply, reference: Reply) -> Verdict:
    if reply.finish is None:
        shorter = Reply(reference.token_ids[: len(reply.token_ids)], None, logprobs=reference.logprobs)
        return compare(reply.token_ids, shorter)
    return compare(reply.token_ids, reference)

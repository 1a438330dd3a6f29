"""Requests sent at set times, and when each token of their answers reached this process."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from pdserve.bench.asking import TIMEOUT_S
from pdserve.client import AsyncClient
from pdserve.client.types import GenerateOptions


@dataclass(frozen=True, slots=True)
class Call:
    """One greedy request for exactly num_output_tokens. at_s: seconds after the first could be sent.

    rank: the data-parallel rank that computes it; None leaves that to the node.
    """

    number: int
    prompt: tuple[int, ...]
    num_output_tokens: int
    at_s: float = 0.0
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Heard:
    """One answer as it was heard. called_s, arrivals_s: on one clock, an arrival a token."""

    number: int
    called_s: float
    arrivals_s: tuple[float, ...]
    token_ids: tuple[int, ...] = ()
    num_cached_tokens: int = 0
    placement: str = ""

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.called_s

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Between tokens; the first has none before it."""
        return tuple(after - before for before, after in itertools.pairwise(self.arrivals_s))

    @property
    def wall_s(self) -> float:
        return self.arrivals_s[-1] - self.called_s


def unique_prompt(text: Sequence[int], num_tokens: int, seed: object) -> tuple[int, ...]:
    """Tokens of the text in random order: one seed a prompt, and no two prompts begin alike."""
    return tuple(Random(str(seed)).choices(text, k=num_tokens))


def _to_the_end(num_tokens: int) -> bool:
    return False


async def hear(client: AsyncClient, call: Call, is_enough: Callable[[int], bool] = _to_the_end) -> Heard:
    """Call now and listen to the end, or until so many tokens are enough. Raises what the request failed with.

    is_enough: asked at each arrival with the number of tokens so far. An answer given up has no placement.
    """
    called_s = time.monotonic()
    arrivals_s: list[float] = []
    token_ids: list[int] = []
    num_cached = 0
    options: GenerateOptions = {
        "token_ids": call.prompt,
        "max_new_tokens": call.num_output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    if call.rank is not None:
        options["data_parallel_rank"] = call.rank
    async with client.stream(**options) as stream:
        async for piece in stream:
            arrivals_s += [time.monotonic()] * len(piece.token_ids)
            token_ids += piece.token_ids
            num_cached = piece.usage.num_cached_tokens
            if is_enough(len(token_ids)):
                return Heard(call.number, called_s, tuple(arrivals_s), tuple(token_ids), num_cached)
        placement = ", ".join(await stream.placements())
    return Heard(call.number, called_s, tuple(arrivals_s), tuple(token_ids), num_cached, placement)


async def hear_all(address: str, calls: Sequence[Call]) -> list[Heard]:
    """Every answer, in the order of `calls`; each request leaves at its time whether or not others have ended."""

    async def later(client: AsyncClient, call: Call) -> Heard:
        await asyncio.sleep(call.at_s - (time.monotonic() - began_s))
        return await hear(client, call)

    async with AsyncClient(address, timeout_s=TIMEOUT_S, max_attempts=1) as client:
        await client.server_info()  # so that no request's time holds the connection's
        began_s = time.monotonic()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(later(client, call)) for call in calls]
    return [task.result() for task in tasks]

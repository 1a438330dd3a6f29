"""What a caller gets whose prefill node is killed: idle, between prefill and decode, and while KV is read."""

from __future__ import annotations

import asyncio
import enum
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.bench.chaos.fleet import Fleet, make_member
from pdserve.bench.failover import NUM_NEW, SETTINGS, Asking, kill_under
from pdserve.bench.handoff_witness import Phase
from pdserve.bench.listening import unique_prompt
from pdserve.bench.peers.http_server import ServerFailed
from pdserve.bench.peers.vllm import VllmPair
from pdserve.config import Role
from pdserve.model.progress import Progress

NUM_TOKENS = 2048
# From vLLM's decode step to its peer's end: a guess, as nothing tells when it reads.
IN_MID_READ_S = 0.02
PATIENCE_S = 120.0


class Moment(enum.Enum):
    IDLE = "idle, before the request"
    BETWEEN = "between prefill and decode"
    READING = "while KV is read"


PHASES = {Moment.IDLE: Phase.IDLE, Moment.BETWEEN: Phase.FIRST_TOKEN, Moment.READING: Phase.READING}


@dataclass(frozen=True, slots=True)
class Killed:
    """outcome: what the caller got; after_s: from the kill, or from the call where P was dead before."""

    engine: str
    moment: str
    outcome: str
    after_s: float


async def kill_ours(model: Path, text: Sequence[int], folder: Path, progress: Progress) -> list[Killed]:
    """One prefill node, killed at each moment and started anew."""
    prefill = make_member(Role.PREFILL, 0, model, folder, {}, **SETTINGS)
    decode = make_member(Role.DECODE, 0, model, folder, {}, **SETTINGS)
    fleet, killed = Fleet([prefill], [decode]), []
    try:
        await fleet.start()
        for number, moment in enumerate(Moment):
            progress("killing pdserve's prefill node", number, len(Moment))
            prompt = unique_prompt(text, NUM_TOKENS, f"kill {moment.value}")
            under = await kill_under(PHASES[moment], fleet, prompt)
            await asyncio.gather(*(member.recover() for member in fleet.members))
            undisturbed = Asking(fleet, prompt)
            await undisturbed.run()
            outcome = f"{_compared(under.asking.token_ids, undisturbed.token_ids)}; prefilled {under.place}"
            if under.reached is not PHASES[moment]:
                outcome += f"; it was {under.reached.value} by then"
            killed.append(Killed("pdserve", moment.value, outcome, under.next_token_s))
    finally:
        await fleet.end()
    progress("killing pdserve's prefill node", len(Moment), len(Moment))
    return killed


async def kill_theirs(pair: VllmPair, text: Sequence[int], progress: Progress) -> list[Killed]:
    """vLLM's two nodes, behind the plainest of routers: one step after the other, and what fails is told."""
    killed = []
    for number, moment in enumerate(Moment):
        progress("killing vLLM's prefill node", number, len(Moment))
        prompt = unique_prompt(text, NUM_TOKENS, f"kill {moment.value}")
        expected = await asyncio.to_thread(_ask, pair, prompt)
        killed.append(await asyncio.to_thread(_kill_at, moment, pair, prompt, expected))
        pair.prefill.begin()
        await asyncio.to_thread(pair.prefill.wait_until_healthy)
    progress("killing vLLM's prefill node", len(Moment), len(Moment))
    return killed


def _ask(pair: VllmPair, prompt: Sequence[int]) -> list[int]:
    return [token for new in pair.decoded(prompt, pair.prefilled(prompt), NUM_NEW) for token in new]


def _kill_at(moment: Moment, pair: VllmPair, prompt: Sequence[int], expected: Sequence[int]) -> Killed:
    begun_s = time.monotonic()
    token_ids: list[int] = []
    first_s = begun_s
    try:
        if moment is Moment.IDLE:
            pair.prefill.kill()
        transfer = pair.prefilled(prompt)
        if moment is Moment.BETWEEN:
            pair.prefill.kill()
        begun_s = time.monotonic()
        if moment is Moment.READING:
            threading.Timer(IN_MID_READ_S, pair.prefill.kill).start()
        for new in pair.decoded(prompt, transfer, NUM_NEW, PATIENCE_S):
            first_s = first_s if token_ids else time.monotonic()
            token_ids += new
    except ServerFailed as error:
        return Killed("vLLM", moment.value, f"failed: {error}", time.monotonic() - begun_s)
    return Killed("vLLM", moment.value, _compared(token_ids, expected), first_s - begun_s)


def _compared(token_ids: Sequence[int], expected: Sequence[int]) -> str:
    return "answered, the same tokens" if list(token_ids) == list(expected) else "answered, OTHER tokens"

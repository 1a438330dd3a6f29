"""The prefill gate on one rank: prompts scattered over the rounds of open streams, with the gate and without."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from pdserve.bench.asking import TIMEOUT_S, Reply, ask_all, verdicts
from pdserve.bench.policy_runs import Model, Outcome, equality_checks, fused_node
from pdserve.bench.stream_checks import Check
from pdserve.bench.workload import Ask
from pdserve.client import AsyncClient

ATTEMPT_INTERVAL, ANY_INTERVAL = 4, 16
NUM_STREAMS, NUM_STREAMED = 16, 160
NUM_SCATTERED = 40
NUM_KV_BLOCKS = 192
WINDOWS = ("any", "all", "idle")


@dataclass(frozen=True, slots=True)
class Work:
    """Streams, and prompts that each come when the first stream has had so many tokens."""

    streams: list[Ask]
    scattered: list[tuple[int, Ask]]


def make_work(model: Model) -> Work:
    random = Random(4)
    streams = model.asks([random.randint(16, 96) for _ in range(NUM_STREAMS)], NUM_STREAMED, random)
    lengths = [random.randint(16, 200) for _ in range(NUM_SCATTERED)]
    prompts = model.asks(lengths, 4, random, first=NUM_STREAMS)
    moments = sorted(random.randint(2, NUM_STREAMED - 20) for _ in prompts)
    return Work(streams, list(zip(moments, prompts, strict=True)))


def measure_gate(model: Model) -> Outcome:
    work = make_work(model)
    gate = {"prefill_attempt_interval": ATTEMPT_INTERVAL, "prefill_any_attempt_interval": ANY_INTERVAL}
    references, off = _serve(model, work, with_logprobs=True)
    replies, on = _serve(model, work, with_logprobs=False, **gate)
    judged = verdicts(replies, references)
    cases = {"gate off": _figures(off), f"A = {ATTEMPT_INTERVAL}, N = {ANY_INTERVAL}": _figures(on)}
    return Outcome(
        f"the gate: {NUM_STREAMS} streams, {NUM_SCATTERED} scattered prompts",
        cases,
        [
            *equality_checks(judged),
            Check("prefill rounds with the gate", on["prefill_rounds"], 0, off["prefill_rounds"] - 1),
            Check("worst wait in rounds", on["gate_worst_wait_rounds"], 1, ANY_INTERVAL + 1),
        ],
    )


def _serve(
    model: Model, work: Work, *, with_logprobs: bool, **settings: Any
) -> tuple[dict[int, Reply], dict[str, int]]:
    """Every reply, and the node's counters."""
    num_slots = NUM_STREAMS + NUM_SCATTERED  # so that a prompt waits for the gate and for nothing else
    with fused_node(model, num_kv_blocks=NUM_KV_BLOCKS, max_num_seqs=num_slots, **settings) as node:
        replies = asyncio.run(_ask(node.address, work, with_logprobs))
        return replies, dict(node.until_quiet().counters)


async def _ask(address: str, work: Work, with_logprobs: bool) -> dict[int, Reply]:
    first, *others = work.streams
    replies: dict[int, Reply] = {}

    async def ask(asks: Sequence[Ask]) -> None:
        replies.update(await ask_all(address, asks, len(asks), with_logprobs=with_logprobs))

    async with AsyncClient(address, timeout_s=TIMEOUT_S, max_attempts=1) as client, asyncio.TaskGroup() as group:
        group.create_task(ask(others))
        scattered = iter(work.scattered)
        moment, prompt = next(scattered)
        num_tokens = 0
        stream = client.stream(
            token_ids=first.prompt, max_new_tokens=first.max_new_tokens, temperature=0.0, ignore_eos=True
        )
        async for piece in stream:
            num_tokens += len(piece.token_ids)
            while num_tokens >= moment:
                group.create_task(ask([prompt]))
                moment, prompt = next(scattered, (NUM_STREAMED + 1, prompt))
    return replies


def _figures(counters: Mapping[str, int]) -> dict[str, float]:
    figures: dict[str, float] = {
        "rounds": counters["rounds"],
        "prefill_rounds": counters["prefill_rounds"],
        "output_tokens": counters["output_tokens"],
    }
    if "gate_votes" in counters:
        figures |= {f"windows_{kind}": counters.get(f"gate_windows_{kind}", 0) for kind in WINDOWS}
        figures |= {
            "rounds_held": counters["gate_rounds_held"],
            "worst_wait_rounds": counters["gate_worst_wait_rounds"],
        }
    return figures

"""Retraction: streams that need three times the pool beside the same streams in a large one."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from random import Random
from typing import Any

from pdserve.bench.asking import Reply, ask_all, verdicts
from pdserve.bench.policy_runs import FusedNode, Model, Outcome, equality_checks, fused_node
from pdserve.bench.stream_checks import Check, exactly
from pdserve.bench.workload import Ask
from pdserve.client import AsyncClient
from pdserve.request import RankLoad

NUM_STREAMS = 32
NUM_NEW = 96
BLOCK_SIZE = 16
SHORTAGE = 3
PEAK_EVERY_S = 0.25


def measure_pool(model: Model) -> Outcome:
    random = Random(5)
    asks = model.asks([random.randint(40, 160) for _ in range(NUM_STREAMS)], NUM_NEW, random)
    num_needed = sum(-(-(len(ask.prompt) + NUM_NEW) // BLOCK_SIZE) for ask in asks)
    num_small = num_needed // SHORTAGE
    host_gb = 1.1 * num_needed * model.block_bytes(BLOCK_SIZE) / 1e9
    references, large = _serve(model, asks, True, num_kv_blocks=num_needed + NUM_STREAMS)
    replies, small = _serve(model, asks, False, num_kv_blocks=num_small, host_kv_gb=host_gb)
    num_prompt = sum(len(ask.prompt) for ask in asks)
    computed_or_found = small["prompt_tokens_computed"] + small["prefix_hit_tokens"]
    return Outcome(
        f"retraction: {NUM_STREAMS} streams that need {num_needed} blocks of {BLOCK_SIZE} tokens",
        {"large pool": large, "a third of the need": small},
        [
            *equality_checks(verdicts(replies, references)),
            Check("retractions", small["retractions"], 1, math.inf),
            exactly("restores", small["restores"], small["retractions"]),
            exactly("requests failed for capacity", small["capacity_failures"], 0),
            exactly("prompt tokens computed, or found in a cache", computed_or_found, num_prompt),
            Check("peak blocks held", small["peak_held_blocks"], 1, num_small),
        ],
    )


def _serve(
    model: Model, asks: Sequence[Ask], with_logprobs: bool, **settings: Any
) -> tuple[dict[int, Reply], dict[str, float]]:
    with fused_node(model, block_size=BLOCK_SIZE, max_num_seqs=NUM_STREAMS, **settings) as node:
        started_s = time.monotonic()
        replies, peak = asyncio.run(_ask(node, asks, with_logprobs))
        elapsed_s = time.monotonic() - started_s
        return replies, _figures(node.until_quiet(), peak, elapsed_s)


async def _ask(node: FusedNode, asks: Sequence[Ask], with_logprobs: bool) -> tuple[dict[int, Reply], int]:
    """All replies, and the most blocks that were seen held."""
    peak = 0

    async def watch() -> None:
        nonlocal peak
        async with AsyncClient(node.address) as client:
            while True:
                (load,) = await client.loads()
                peak = max(peak, load.num_held_blocks)
                await asyncio.sleep(PEAK_EVERY_S)

    watching = asyncio.create_task(watch())
    try:
        return await ask_all(node.address, asks, len(asks), with_logprobs=with_logprobs), peak
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


def _figures(load: RankLoad, peak: int, elapsed_s: float) -> dict[str, float]:
    names = (
        "retractions",
        "restores",
        "capacity_failures",
        "prompt_tokens_computed",
        "prefix_hit_tokens",
        "output_tokens",
        "prefill_rounds",
        "rounds",
    )
    moved = {
        f"{what}_blocks": load.counters.get(f"host:{what}_blocks", 0) for what in ("image", "loaded", "write_back")
    }
    return {
        "blocks": load.num_blocks,
        "peak_held_blocks": peak,
        **{name: load.counters[name] for name in names},
        **moved,
        "wall_s": elapsed_s,
    }

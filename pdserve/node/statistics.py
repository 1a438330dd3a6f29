"""What a node logs of itself: once when it serves, then while something happens."""

from __future__ import annotations

import asyncio
import logging

from pdserve.errors import NotReady
from pdserve.node.site import Parts, Site

log = logging.getLogger(__name__)


def log_start(site: Site, port: int) -> None:
    ready, block_size = site.ready, site.ready.fingerprint.block_size
    log.info(
        "serving %s as %s on %s:%d: KV blocks of %d tokens: %d, for %d tokens in all (%.1f GiB) and %d a request; "
        "compute threads: %d",
        site.args.public_name,
        site.args.role,
        site.args.host,
        port,
        block_size,
        ready.num_blocks,
        ready.num_blocks * block_size,
        ready.num_blocks * ready.block_bytes / 2**30,
        ready.max_model_len,
        site.args.compute_threads,
    )


async def log_stats(parts: Parts, interval_s: float) -> None:
    """One line an interval while something happens."""
    before = {"output_tokens": 0, "prompt_tokens_computed": 0}
    while True:
        await asyncio.sleep(interval_s)
        try:
            loads = await parts.loads()
        except NotReady as error:
            log.warning("no statistics: %s", error.message)
            continue
        now = {name: sum(load.counters.get(name, 0) for load in loads) for name in before}
        if now != before:
            log.info(
                "%d running, %d waiting, %.1f prompt and %.1f output tokens/s, %d of %d KV blocks held",
                sum(load.num_running for load in loads),
                sum(load.num_waiting for load in loads),
                (now["prompt_tokens_computed"] - before["prompt_tokens_computed"]) / interval_s,
                (now["output_tokens"] - before["output_tokens"]) / interval_s,
                sum(load.num_held_blocks for load in loads),
                sum(load.num_blocks for load in loads),
            )
        before = now

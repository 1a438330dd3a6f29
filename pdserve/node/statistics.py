"""What a node logs of itself: once when it serves, then while something happens."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from pdserve.errors import NotReady
from pdserve.node.site import Parts, Site
from pdserve.request import RankLoad

COUNTED = ("output_tokens", "prompt_tokens_computed")

log = logging.getLogger(__name__)


def log_start(site: Site, port: int) -> None:
    ready, block_size = site.ready, site.ready.fingerprint.block_size
    log.info(
        "serving %s as %s on %s:%d: KV blocks of %d tokens in %s: %d, for %d tokens in all (%.1f GiB) and %d a "
        "request; compute threads: %d",
        site.args.public_name,
        site.args.role,
        site.args.host,
        port,
        block_size,
        ready.fingerprint.dtype,
        ready.num_blocks,
        ready.num_blocks * block_size,
        ready.num_blocks * ready.block_bytes / 2**30,
        ready.max_model_len,
        site.args.compute_threads,
    )


async def log_stats(parts: Parts, interval_s: float, clock: Callable[[], float] = time.monotonic) -> None:
    """One line an interval while something happens; a silence of the ranks is told when it begins and when it is over.

    Rates are of the time since the last report, however long that was.
    """
    before = dict.fromkeys(COUNTED, 0)
    reported_s = clock()
    is_silent = False
    while True:
        await asyncio.sleep(interval_s)
        try:
            loads = await parts.loads()
        except NotReady as error:
            if not is_silent:
                log.warning("no statistics until it is over: %s", error.message)
            is_silent = True
            continue
        now_s = clock()
        if is_silent:
            log.info("statistics again, after %.0f s without", now_s - reported_s)
        now = {name: sum(load.counters.get(name, 0) for load in loads) for name in COUNTED}
        if now != before:
            _log_rates(loads, {name: (now[name] - before[name]) / (now_s - reported_s) for name in COUNTED})
        before, reported_s, is_silent = now, now_s, False


def _log_rates(loads: Sequence[RankLoad], rates: Mapping[str, float]) -> None:
    log.info(
        "%d running, %d waiting, %.1f prompt and %.1f output tokens/s, %d of %d KV blocks held",
        sum(load.num_running for load in loads),
        sum(load.num_waiting for load in loads),
        rates["prompt_tokens_computed"],
        rates["output_tokens"],
        sum(load.num_held_blocks for load in loads),
        sum(load.num_blocks for load in loads),
    )

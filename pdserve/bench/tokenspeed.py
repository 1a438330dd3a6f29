"""TokenSpeed's scheduler (PyPI: tokenspeed-scheduler), driven as ours is: the yardstick of tests and benches.

Without overlap and without a tier below the device. What it calls a page is our block; it counts a null page beside
the usable ones, and its caller says when an answer ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import tokenspeed_scheduler as ts

from pdserve.scheduler.config import SchedulerConfig

TOKEN = 7  # every answer is made of it
# It reserves blocks for so many tokens of an answer at admission; a comparison gives ours the same headroom.
ANSWER_HEADROOM = 4096


class Chunk(NamedTuple):
    """Prompt tokens [start, end) of a request."""

    request_id: str
    start: int
    end: int


class Round(NamedTuple):
    """What one round computes: chunks of prompts, and who gets a next token. Both in the order of the batch."""

    chunks: tuple[Chunk, ...] = ()
    decodes: tuple[str, ...] = ()


class TokenSpeed:
    """A scheduler of theirs with our numbers."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.scheduler = ts.Scheduler(_translated(config))
        self._num_prompt_tokens: dict[str, int] = {}
        self._num_left: dict[str, int] = {}

    @property
    def is_idle(self) -> bool:
        return not self._num_left

    def submit(self, request_id: str, prompt: Sequence[int], max_new_tokens: int) -> None:
        """Raises ValueError for what can never fit."""
        spec = ts.RequestSpec()
        spec.request_id = request_id
        spec.tokens = list(prompt)
        spec.max_new_tokens = max_new_tokens
        spec.max_cached_prefix_tokens = len(prompt)
        self.scheduler.submit_requests([spec])
        self._num_prompt_tokens[request_id] = len(prompt)
        self._num_left[request_id] = max_new_tokens

    def abort(self, request_id: str) -> None:
        if self._num_left.pop(request_id, None) is not None:
            self.advance(_bundle([_event(ts.ForwardEvent.Abort, request_id)]))

    def plan(self) -> Any:
        """Their plan, for `read`."""
        return self.scheduler.next_execution_plan()

    def read(self, plan: Any) -> Round:
        assert not plan.aborts, [abort.detail for abort in plan.aborts]
        if not plan.forward:
            return Round()
        (batch,) = plan.forward
        num_extends = batch.num_extends()
        ids, lengths = list(batch.request_ids), list(batch.input_lengths)
        chunks = tuple(
            Chunk(request_id, start, start + length)
            for request_id, start, length in zip(ids[:num_extends], batch.extend_prefix_lens, lengths, strict=False)
        )
        return Round(chunks, tuple(ids[num_extends:]))

    def results(self, done: Round) -> Any:
        """What the forward of a round brings, for `advance`: a token for whoever draws one, and who ended with it."""
        return _bundle(self._events(done))

    def advance(self, results: Any) -> None:
        self.scheduler.advance(results)

    def _events(self, done: Round) -> Iterator[Any]:
        for chunk in done.chunks:
            if chunk.end == self._num_prompt_tokens[chunk.request_id]:
                yield from self._token(chunk.request_id)
            else:
                yield _event(ts.ForwardEvent.ExtendResult, chunk.request_id)
        for request_id in done.decodes:
            yield from self._token(request_id)

    def _token(self, request_id: str) -> Iterator[Any]:
        result = _event(ts.ForwardEvent.ExtendResult, request_id)
        result.tokens = [TOKEN]
        yield result
        self._num_left[request_id] -= 1
        if self._num_left[request_id] == 0:
            del self._num_left[request_id]
            yield _event(ts.ForwardEvent.Finish, request_id)


def _bundle(events: Iterable[Any]) -> Any:
    bundle = ts.ExecutionEvent()
    for event in events:
        bundle.add_event(event)
    return bundle


def _event(kind: Any, request_id: str) -> Any:
    event = kind()
    event.request_id = request_id
    return event


def _translated(config: SchedulerConfig) -> Any:
    """One cache group of full attention."""
    group = ts.CacheGroupConfig()
    group.group_id = "kv"
    group.attn_kind = ts.AttnKind.Full
    group.block_granularity = config.block_size
    group.total_pages = config.num_blocks + 1
    theirs = ts.SchedulerConfig()
    theirs.cache_groups = [group]
    theirs.num_device_pages = config.num_blocks + 1
    theirs.prefix_granularity = config.block_size
    theirs.max_batch_size = config.max_batch_size
    theirs.max_scheduled_tokens = config.max_scheduled_tokens
    theirs.enable_mixed_prefill_decode = config.enable_mixed_batch
    theirs.disable_prefix_cache = not config.prefix_caching
    theirs.disable_l2_cache = True
    theirs.num_host_pages = theirs.num_snapshot_pages = 1  # the null page alone: no tier
    return theirs

"""What a scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What happened since the start."""

    prompt_tokens_computed: int = 0
    output_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    rounds: int = 0
    prefill_rounds: int = 0
    ignored_events: int = 0
    reroutes: int = 0
    remote_retries: int = 0
    capacity_failures: int = 0
    reservations_taken_back: int = 0
    retractions: int = 0
    restores: int = 0
    host_hit_tokens: int = 0
    storage_fetches: int = 0
    storage_blocks_fetched: int = 0

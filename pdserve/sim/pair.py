"""The victim and the attacker: a stream at work, and a long prompt that arrives beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdserve.sim.workload import SimRequest

VICTIM, ATTACKER = 0, 1


@dataclass(frozen=True, slots=True)
class Pair:
    """By default the experiment of "interleave decode steps into long prefill runs". has_attacker: False = the victim
    alone. attack_s: after the victim called.
    """

    victim_prompt_tokens: int = 32
    victim_output_tokens: int = 699
    attacker_prompt_tokens: int = 200_019
    attacker_output_tokens: int = 3
    attack_s: float = 6.0
    has_attacker: bool = True

    def arrivals(self) -> Iterator[SimRequest]:
        yield SimRequest(VICTIM, 0.0, self.victim_prompt_tokens, self.victim_output_tokens)
        if self.has_attacker:
            yield SimRequest(ATTACKER, self.attack_s, self.attacker_prompt_tokens, self.attacker_output_tokens)

    def after(self, request: SimRequest, now_s: float) -> SimRequest | None:
        return None

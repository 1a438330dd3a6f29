"""What a rank remembers of its last rounds: what each of them ran, for how long, and what the prefill gate said."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

# Of each rank; older ones are forgotten.
NUM_KEPT = 4096


class GateDecision(enum.Enum):
    """Why a round may carry prefill, or that it may not. A group's ranks all decide the same."""

    # open
    ANY = "any"  # an ANY point, and some rank wants prefill
    ALL = "all"  # an ALL point, and every rank wants prefill or has nothing to decode
    BURST = "burst"  # ALL again, straight after a round with prefill
    IDLE = "idle"  # an ALL point at which no rank has anything to decode
    # closed
    BETWEEN = "between"  # neither point
    UNWANTED = "unwanted"  # an ANY point at which no rank wants prefill
    DECODING = "decoding"  # an ALL point at which a rank decodes and wants no prefill
    LIMIT = "limit"  # after as many rounds with prefill in a row as may be
    CADENCE = "cadence"  # no gate's word but the rank's own: a decode is due, and goes first where it can run

    @property
    def is_open(self) -> bool:
        return self in OPEN


OPEN = frozenset({GateDecision.ANY, GateDecision.ALL, GateDecision.BURST, GateDecision.IDLE})


class Round(NamedTuple):
    """One round of one rank. Absent is what there was none of: a group, a gate, a forward, a transport.

    A tuple, as one is noted each round.

    number: of this rank, one more each time. group_number: of the group that goes in step, the same in all its ranks.
    start_us: on the machine's monotonic clock. gather_us: telling the group and hearing it, waiting for its slowest
    included. forward_at_us: when the forward began, after the start; a forward without rows of this rank counts.
    num_decode_rows: a token each. vote: for prefill, as published to the group. is_held: the gate was closed to a
    prefill that this rank wanted. num_largest_tokens: of the rank with most in this round of the group.
    num_transfers: KV under way when the round ended, pulled into this rank or leased from it.
    """

    number: int
    start_us: int
    plan_us: int
    total_us: int
    num_prefill_rows: int
    num_prefill_tokens: int
    num_decode_rows: int
    group_number: int | None = None
    gather_us: int | None = None
    forward_at_us: int | None = None
    forward_us: int | None = None
    vote: bool | None = None
    decision: GateDecision | None = None
    is_held: bool | None = None
    num_largest_tokens: int | None = None
    num_transfers: int | None = None

    @property
    def step(self) -> int:
        """The number by which it is found in the other ranks of its group, if it has one."""
        return self.number if self.group_number is None else self.group_number


@dataclass(frozen=True, slots=True)
class RankRounds:
    """Rounds of one rank, one after the other.

    newest: the number of its last round, here or not. num_lost: rounds before these that nobody was sent and that are
    forgotten. unix_offset_us: start_us and this is the time of day.
    """

    rank: int
    newest: int
    rounds: tuple[Round, ...] = ()
    num_lost: int = 0
    unix_offset_us: int = 0

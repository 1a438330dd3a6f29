"""Rounds between pdserve's types and the Admin protos."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pdserve.errors import InvalidRequest
from pdserve.rounds import NUM_KEPT, GateDecision, RankRounds, Round
from pdserve.v1 import admin_pb2 as pb

DEFAULT_LAST = 128
# Rounds of one response: a node has others to answer before it encodes more.
MOST_A_RESPONSE = 256

DECISIONS = {decision: pb.GateDecision.Value(f"GATE_DECISION_{decision.name}") for decision in GateDecision}
_DECISIONS_BACK = {value: decision for decision, value in DECISIONS.items()}


def decode_last(request: pb.StreamRoundsRequest) -> int:
    """How many rounds of the past. Raises InvalidRequest."""
    last = request.last if request.HasField("last") else DEFAULT_LAST
    if last > NUM_KEPT:
        raise InvalidRequest(f"last is {last}, a rank keeps {NUM_KEPT} rounds; ask for that many at most", "last")
    if last == 0 and not request.follow:
        raise InvalidRequest("last is 0 and follow is not set, which asks for nothing; set one of them", "last")
    return last


def encode_rounds(rounds: RankRounds) -> Iterator[pb.StreamRoundsResponse]:
    """One response at least; what was lost is told in the first."""
    for first in range(0, max(1, len(rounds.rounds)), MOST_A_RESPONSE):
        yield pb.StreamRoundsResponse(
            rank=rounds.rank,
            rounds=[_encode_round(one) for one in rounds.rounds[first : first + MOST_A_RESPONSE]],
            num_lost=0 if first else rounds.num_lost,
            newest=rounds.newest,
            unix_offset_us=rounds.unix_offset_us,
        )


def decode_rounds(message: pb.StreamRoundsResponse) -> RankRounds:
    return RankRounds(
        message.rank,
        message.newest,
        tuple(_decode_round(one) for one in message.rounds),
        message.num_lost,
        message.unix_offset_us,
    )


def _encode_round(one: Round) -> pb.Round:
    values = one._asdict()
    values["decision"] = None if one.decision is None else DECISIONS[one.decision]
    return pb.Round(**values)


def _decode_round(message: pb.Round) -> Round:
    """A decision that only a newer node knows is None."""
    fields = pb.Round.DESCRIPTOR.fields
    values: dict[str, Any] = {
        field.name: None if field.has_presence and not message.HasField(field.name) else getattr(message, field.name)
        for field in fields
    }
    return Round(**{**values, "decision": _DECISIONS_BACK.get(message.decision)})

import pytest

from pdserve.rounds import GateDecision, RankRounds, Round
from pdserve.rpc.rounds_codec import decode_rounds, encode_rounds
from pdserve.v1 import admin_pb2 as pb

BARE = Round(1, 2**60, 0, 0, 0, 0, 0)
FULL = Round(
    2**40, 1, 2, 2**40, 3, 512, 8, 2**40, 5, 6, 7, vote=False, decision=GateDecision.LIMIT, is_held=False,
    num_largest_tokens=0, num_transfers=0,
)  # fmt: skip


@pytest.mark.parametrize("decision", GateDecision)
def test_rounds_come_back_as_they_were_and_absent_is_not_zero(decision: GateDecision) -> None:
    rounds = RankRounds(3, 2**41, (BARE, FULL._replace(decision=decision)), 2**40, -5)
    (response,) = encode_rounds(rounds)
    assert decode_rounds(pb.StreamRoundsResponse.FromString(response.SerializeToString())) == rounds


def test_a_decision_of_a_newer_node_is_unknown_and_no_error() -> None:
    message = pb.StreamRoundsResponse(rounds=[pb.Round(number=1)])
    message.rounds[0].decision = 99  # type: ignore[assignment]
    assert decode_rounds(message).rounds[0].decision is None

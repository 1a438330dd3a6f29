import pytest

from pdserve.errors import InternalError
from pdserve.request import FinishReason, GenerateChunk, GenerateRequest, RequestId, SamplingParams, TokenDelta
from pdserve.rpc.answer import AnswerEncoder

REQUEST = GenerateRequest(RequestId("r"), (1, 2), SamplingParams(4), num_samples=2)


def ending(index: int, matched_stop: str | int | None) -> GenerateChunk:
    return GenerateChunk(index, TokenDelta((3,), finish=FinishReason.STOP, placement="p"), "c", 1, matched_stop)


def test_what_stopped_an_answer_is_told_as_what_it_was() -> None:
    answer = AnswerEncoder(REQUEST, is_streamed=False)
    (by_string,) = answer.responses(ending(0, "\n"))
    (by_token,) = answer.responses(ending(1, 0))
    assert by_string.complete.WhichOneof("matched_stop") == "matched_stop_string"
    assert by_token.complete.WhichOneof("matched_stop") == "matched_stop_token_id"
    answer.check_complete()
    assert answer.placements == ("p", "p")


def test_an_empty_delta_sends_nothing() -> None:
    answer = AnswerEncoder(REQUEST, is_streamed=True)
    assert list(answer.responses(GenerateChunk(0, TokenDelta(()), "", 0))) == []
    assert answer.placements == ()


def test_a_sample_without_its_end_is_our_fault() -> None:
    answer = AnswerEncoder(REQUEST, is_streamed=True)
    assert len(list(answer.responses(ending(0, None)))) == 2
    with pytest.raises(InternalError, match=r"without the end of samples \[1\]"):
        answer.check_complete()

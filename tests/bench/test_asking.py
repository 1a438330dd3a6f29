import pytest

from pdserve.bench.asking import Reply, Verdict, ask_all, compare, verdicts
from pdserve.bench.workload import Ask, Cancel, make_asks
from pdserve.request import FinishReason, TokenLogprobs
from pdserve.rpc.fake import EchoGenerator, fake_node


def reference(*gaps: float) -> Reply:
    """Tokens 1, 2, 3 ..., each so much likelier than its runner-up, token 99."""
    logprobs = tuple(
        TokenLogprobs(token, -0.5, ((token, -0.5), (99, -0.5 - gap))) for token, gap in enumerate(gaps, start=1)
    )
    return Reply(tuple(entry.token_id for entry in logprobs), FinishReason.LENGTH, logprobs=logprobs)


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ((1, 2, 3), Verdict.EQUAL),
        ((1, 99, 7), Verdict.TIED),  # and compared no further
        ((99, 2, 3), Verdict.DIFFERENT),
        ((1, 2, 99), Verdict.DIFFERENT),
        ((1, 2), Verdict.DIFFERENT),
        ((1, 2, 3, 4), Verdict.DIFFERENT),
    ],
)
def test_answers_may_part_only_where_the_reference_has_two_best_tokens(
    answer: tuple[int, ...], verdict: Verdict
) -> None:
    assert compare(answer, reference(0.3, 0.0009, 0.0011)) is verdict


def test_an_answer_that_was_given_up_is_compared_as_far_as_it_came() -> None:
    replies = {0: Reply((1, 2), None), 1: Reply((99,), None), 2: Reply((), None), 3: Reply((1, 2), FinishReason.STOP)}
    judged = verdicts(replies, dict.fromkeys(replies, reference(0.3, 0.3, 0.3)))
    assert list(judged.values()) == [Verdict.EQUAL, Verdict.DIFFERENT, Verdict.EQUAL, Verdict.DIFFERENT]


def test_a_seed_is_a_workload() -> None:
    asks = make_asks(range(3000), 50, 0.2, seed=4)
    assert asks == make_asks(range(3000), 50, 0.2, seed=4)
    assert asks != make_asks(range(3000), 50, 0.2, seed=5)
    assert sum(ask.cancel is not None for ask in asks) == 10


async def test_callers_give_up_when_they_were_told_to() -> None:
    generator = EchoGenerator()
    generator.hold_after = 4
    asks = [
        Ask(0, (1, 2, 3), 4, None),
        Ask(1, (1, 2, 3), 9, Cancel(after_tokens=2)),
        Ask(2, (1, 2, 3), 9, Cancel(after_s=0.2)),
        Ask(3, (4, 5), 4, None),
    ]
    async with fake_node(generator) as address:
        replies = await ask_all(address, asks, num_streams=2)
    assert replies[0].token_ids == (1, 2, 3, 1)
    assert replies[0].placement == "local;reason=fused"
    assert (replies[1].token_ids, replies[1].finish) == ((1, 2), None)
    assert (replies[2].token_ids, replies[2].finish) == ((1, 2, 3, 1), None)
    assert replies[3].token_ids == (4, 5, 4, 5)

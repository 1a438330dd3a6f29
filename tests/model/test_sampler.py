"""Per-slot sampling parameters, against the adjustments written out token by token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdserve.model.sampler import Sampler
from pdserve.request import RequestId, SamplingParams, TokenRequest
from pdserve.scheduler.plan import SlotStart

VOCAB = 12
EOS = 3
RequestOf = Callable[..., TokenRequest]


def sampler_with(*requests: TokenRequest, forced: tuple[int, ...] = ()) -> Sampler:
    sampler = Sampler(VOCAB, len(requests), (EOS,))
    for slot, request in enumerate(requests):
        sampler.start(SlotStart(request.request_id, slot, forced), request)
    return sampler


def draw(sampler: Sampler, logits: list[list[float]], position: int = 0) -> list[int]:
    """Row r is slot r."""
    slots = np.arange(len(logits))
    return sampler.draw(torch.tensor(logits), slots, np.full(len(logits), position)).tokens.tolist()


def favouring(*tokens: int) -> list[float]:
    """Logits that go down in this order."""
    logits = [0.0] * VOCAB
    for rank, token in enumerate(tokens):
        logits[token] = 10.0 - rank
    return logits


def test_greedy_takes_the_most_likely_and_rows_do_not_mix(request_of: RequestOf) -> None:
    sampler = sampler_with(
        request_of("greedy", [1], 9), request_of("biased", [1], 9, logit_bias=((7, 100.0), (7, 1.0), (2, -100.0)))
    )
    assert draw(sampler, [favouring(2), favouring(2)]) == [2, 7]


def test_no_answer_ends_before_min_new_tokens(request_of: RequestOf) -> None:
    ends = {"min_new_tokens": 2, "stop_token_ids": (5,)}
    sampler = sampler_with(
        request_of("eos", [1], 9, **ends),
        request_of("ignores", [1], 9, ignore_eos=True, **ends),
        request_of("no", [1], 9),
    )
    rows = [favouring(EOS, 5, 8)] * 3
    assert draw(sampler, rows, position=1) == [8, EOS, EOS]
    assert draw(sampler, rows, position=2) == [EOS, EOS, EOS]


@settings(max_examples=40, deadline=None)
@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),
    output=st.lists(st.integers(0, VOCAB - 1), max_size=8),
    num_forced=st.integers(0, 8),
    repetition=st.sampled_from([1.0, 0.5, 1.7]),
    frequency=st.sampled_from([0.0, 0.6, -0.4]),
    presence=st.sampled_from([0.0, 1.1]),
    data=st.data(),
)
def test_penalties_equal_the_definition(
    prompt: list[int],
    output: list[int],
    num_forced: int,
    repetition: float,
    frequency: float,
    presence: float,
    data: st.DataObject,
) -> None:
    logits = data.draw(st.lists(st.sampled_from([-2.5, -1.0, 0.0, 0.75, 3.0]), min_size=VOCAB, max_size=VOCAB))
    params = SamplingParams(
        99,
        temperature=0,
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
        num_logprobs=0,
    )
    request = TokenRequest(RequestId("r"), tuple(prompt), params)
    num_forced = min(num_forced, len(output))
    sampler = Sampler(VOCAB, 1, (EOS,))
    sampler.start(SlotStart(request.request_id, 0, tuple(output[:num_forced])), request)
    for token in output[num_forced:]:
        # A draw that can only be this token, to have it counted.
        only = torch.full((1, VOCAB), -torch.inf)
        only[0, token] = 0.0
        assert sampler.draw(only, np.array([0]), np.array([0])).tokens.tolist() == [token]
    given_logits = torch.tensor([logits])
    drawn = sampler.draw(given_logits, np.array([0]), np.array([len(output)]))
    counts, expected = Counter(output), list(logits)
    for token in set(prompt) | set(output):
        expected[token] = expected[token] / repetition if expected[token] > 0 else expected[token] * repetition
    for token, count in counts.items():
        expected[token] -= frequency * count + presence
    assert given_logits[0].tolist() == pytest.approx(expected, abs=1e-5)
    # The log probability is of the logits as the model made them.
    raw = torch.tensor(logits).log_softmax(0)
    assert drawn.logprobs[0].logprob == pytest.approx(float(raw[drawn.tokens[0]]), abs=1e-6)


def test_a_reused_slot_has_no_penalties_left(request_of: RequestOf) -> None:
    sampler = sampler_with(request_of("old", [2], 9, repetition_penalty=50.0, frequency_penalty=2.0))
    draw(sampler, [favouring(6)])
    again = request_of("new", [1], 9, presence_penalty=0.5)
    sampler.start(SlotStart(again.request_id, 0), again)
    assert draw(sampler, [favouring(2, 6)]) == [2]


def test_only_rows_that_asked_get_logprobs_best_first(request_of: RequestOf) -> None:
    sampler = sampler_with(
        request_of("none", [1], 9), request_of("two", [1], 9, num_logprobs=2), request_of("own", [1], 9, num_logprobs=0)
    )
    logits = torch.tensor([favouring(4, 5, 6)] * 3)
    expected = logits[0].log_softmax(0).tolist()
    logprobs = sampler.draw(logits, np.arange(3), np.zeros(3, np.int64)).logprobs
    assert logprobs.keys() == {1, 2}
    assert logprobs[1].logprob == pytest.approx(expected[4])
    assert [token for token, _ in logprobs[1].top] == [4, 5]
    assert [value for _, value in logprobs[1].top] == pytest.approx([expected[4], expected[5]])
    assert logprobs[2].top == ()


def test_a_seed_gives_the_same_tokens_in_any_company(request_of: RequestOf) -> None:
    torch.manual_seed(0)
    logits = torch.randn(20, VOCAB).tolist()
    seeded = request_of("seeded", [1], 99, temperature=1.2, seed=-5, top_p=0.9)
    others = [request_of(str(seed), [1], 99, temperature=0.8, seed=seed, frequency_penalty=1.0) for seed in range(4)]
    alone, crowd = sampler_with(seeded), sampler_with(seeded, *others)
    tokens = [draw(alone, [row], position)[0] for position, row in enumerate(logits)]
    assert [draw(crowd, [row] * 5, position)[0] for position, row in enumerate(logits)] == tokens
    assert len(set(tokens)) > 1


def test_samples_of_one_seed_differ(request_of: RequestOf) -> None:
    requests = [request_of(str(i), [1], 99, temperature=1.0, seed=7, sample_index=i) for i in range(8)]
    sampler = sampler_with(*requests)
    assert len({tuple(draw(sampler, [[0.0] * VOCAB] * 8, position)) for position in range(3)}) == 3
    assert len(set(draw(sampler, [[0.0] * VOCAB] * 8))) > 1

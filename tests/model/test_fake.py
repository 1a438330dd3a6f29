"""The fake runner generates what it must, and notices KV that isn't what was written."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pdserve.kv.layout import KVLayout
from pdserve.kv.storage import KVStorage
from pdserve.model.fake import FakeRunner, expected_tokens
from pdserve.request import RequestId, TokenRequest
from pdserve.scheduler.plan import RoundPlan, Row, SlotStart

VOCAB = 1000
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=2, block_size=4)


def test_any_chunks_and_blocks_give_the_expected_tokens(
    request_of: Callable[..., TokenRequest], server_of: Any
) -> None:
    rng = random.Random(1)
    requests = [request_of(str(n), [rng.randrange(VOCAB) for _ in range(n)], 9) for n in (1, 3, 4, 17, 30)]
    for chunk in (1, 5, 64):
        storage = KVStorage(LAYOUT, 64)
        answers = server_of(FakeRunner(storage, VOCAB, 8, 64), storage, chunk).serve(requests)
        for answer in answers:
            assert answer.output == expected_tokens(answer.request.prompt, 9, VOCAB)


def test_a_forced_output_is_history(request_of: Callable[..., TokenRequest], server_of: Any) -> None:
    storage = KVStorage(LAYOUT, 64)
    request = request_of("r", [1, 2, 3], 6)
    (answer,) = server_of(FakeRunner(storage, VOCAB, 1, 64), storage).serve([request], forced=[(4, 5)])
    assert answer.output == expected_tokens([1, 2, 3, 4, 5], 4, VOCAB)


def test_banned_tokens_are_never_drawn(request_of: Callable[..., TokenRequest], server_of: Any) -> None:
    storage = KVStorage(LAYOUT, 64)
    answers = server_of(FakeRunner(storage, 3, 1, 64, banned_tokens=(1,)), storage).serve([request_of("r", [0], 40)])
    assert set(answers[0].output) == {0, 2}
    assert answers[0].output == expected_tokens([0], 40, 3, banned_tokens=(1,))


@pytest.mark.parametrize("plane", [(0, "k"), (1, "v")])
@pytest.mark.parametrize("position", [0, 5, 9])
def test_a_changed_cell_anywhere_in_the_context_changes_the_token(
    request_of: Callable[..., TokenRequest], plane: tuple[int, str], position: int
) -> None:
    storage = KVStorage(LAYOUT, 8)
    runner = FakeRunner(storage, 10**6, 1, 64)
    prompt = list(range(10))
    runner.start(SlotStart(RequestId("r"), 0), request_of("r", prompt, 3))
    blocks = (3, 1, 6)
    runner.execute(RoundPlan(0, prefill=(Row(RequestId("r"), 0, 0, 10, blocks, True),)))  # type: ignore[arg-type]
    cell = storage.view(*plane)[blocks[position // 4], 0, position % 4, 0]
    cell.copy_(torch.tensor(1.5))
    drawn = runner.execute(RoundPlan(1, decode=(Row(RequestId("r"), 0, 10, 11, (), True),))).tokens[0]
    assert drawn != expected_tokens(prompt, 2, 10**6)[1]


def test_copied_blocks_serve_as_well_as_computed_ones(request_of: Callable[..., TokenRequest]) -> None:
    prefill, decode = KVStorage(LAYOUT, 8), KVStorage(LAYOUT, 8)
    prompt = list(range(40, 46))
    request = request_of("r", prompt, 4)
    first = FakeRunner(prefill, VOCAB, 1, 64)
    first.start(SlotStart(request.request_id, 0), request)
    drawn = first.execute(RoundPlan(0, prefill=(Row(request.request_id, 0, 0, 6, (7, 2), True),))).tokens[0]  # type: ignore[arg-type]
    decode.slab[[1, 4]] = prefill.slab[[7, 2]]
    second = FakeRunner(decode, VOCAB, 1, 64)
    second.start(SlotStart(request.request_id, 0, (drawn,)), request)
    row = Row(request.request_id, 0, 6, 7, (1, 4), True)  # type: ignore[arg-type]
    assert [drawn, *second.execute(RoundPlan(0, decode=(row,))).tokens] == expected_tokens(prompt, 2, VOCAB)


def test_the_same_token_after_another_prefix_has_another_cell(request_of: Callable[..., TokenRequest]) -> None:
    storage = KVStorage(LAYOUT, 4)
    runner = FakeRunner(storage, VOCAB, 2, 64)
    for slot, prompt in enumerate(([1, 2, 3], [9, 2, 3])):
        request = request_of(str(slot), prompt, 1)
        runner.start(SlotStart(request.request_id, slot), request)
        runner.execute(RoundPlan(slot, prefill=(Row(request.request_id, slot, 0, 3, (slot,), True),)))  # type: ignore[arg-type]
    cells = storage.view(0, "k").view(torch.int32)
    assert cells[0, 0, 2, 0] != cells[1, 0, 2, 0]


def test_logprobs_come_to_those_who_asked(request_of: Callable[..., TokenRequest], server_of: Any) -> None:
    storage = KVStorage(LAYOUT, 64)
    asks = request_of("asks", [1, 2, 3, 4, 5], 3, num_logprobs=2, prompt_logprobs=0)
    answers = server_of(FakeRunner(storage, VOCAB, 2, 64), storage, 2).serve([asks, request_of("not", [1], 3)])
    assert [entry.token_id for entry in answers[0].logprobs] == answers[0].output
    assert [len(entry.top) for entry in answers[0].logprobs] == [2, 2, 2]
    assert [entry.token_id for entry in answers[0].prompt_logprobs] == [2, 3, 4, 5]
    assert answers[1].logprobs == answers[1].prompt_logprobs == []


def test_a_layout_whose_rows_cannot_hold_a_cell_is_refused() -> None:
    with pytest.raises(ValueError, match="2 bytes"):
        FakeRunner(KVStorage(KVLayout(1, 1, 1, 4, "float16"), 1), VOCAB, 1, 8)

"""The round loop by its messages: what goes in, and that each accepted request comes out exactly once."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.engine.messages import Abort, AskLoad, LoadReport, Outputs, Ping, Pong
from pdserve.request import BlockId, FinishReason, RequestId
from pdserve.rpc.fake import EOS
from tests.engine.loops import Loop, expected, running, tokens
from tests.engine.other_end import wait_for
from tests.roles.inside import Held, Size


@pytest.fixture
def loop(sockets: Path) -> Iterator[Loop]:
    with running(sockets, Size(num_blocks=16, num_slots=4, max_model_len=512)) as loop:
        yield loop


def test_an_answer_comes_token_by_token_and_ends_once(loop: Loop) -> None:
    loop.submit("a", [1, 2, 3], 4)
    outputs = loop.until_over("a")["a"]
    assert [output.token_ids for output in outputs] == [(token,) for token in expected([1, 2, 3], 4)]
    assert [output.finish for output in outputs] == [None, None, None, FinishReason.LENGTH]


def test_the_models_own_end_of_text_stops_an_answer_unless_it_is_ignored(loop: Loop) -> None:
    stop = expected([5], 3)[2]
    loop.submit("a", [5], 9, stop_token_ids=(stop,))
    (last,) = loop.until_over("a")["a"][-1:]
    assert (last.finish, last.matched_stop_token) == (FinishReason.STOP, stop)
    loop.inside.loop._eos_token_ids = frozenset({EOS, stop})
    loop.submit("b", [5], 9)
    loop.submit("c", [5], 9, ignore_eos=True)
    outputs = loop.until_over("b", "c")
    assert tokens(outputs["b"]) == expected([5], 3)
    assert tokens(outputs["c"]) == expected([5], 9)


def test_prompt_log_probabilities_come_with_the_first_token_alone(loop: Loop) -> None:
    loop.submit("a", list(range(200)), 3, prompt_logprobs=0, num_logprobs=1)
    outputs = loop.until_over("a")["a"]
    assert [len(output.prompt_logprobs or ()) for output in outputs] == [199, 0, 0]
    assert [output.prompt_logprobs is None for output in outputs] == [False, True, True]
    assert all(len(output.logprobs) == 1 for output in outputs)


def test_a_loop_answers_between_rounds_with_the_prompt_tokens_it_has_computed(loop: Loop) -> None:
    loop.front.send(Ping())
    assert loop.front.hear(Pong).num_tokens_computed == 0
    loop.submit("a", [1] * 200, 3)
    loop.until_over("a")
    loop.front.send(Ping())
    assert loop.front.hear(Pong).num_tokens_computed == 200


def test_a_loop_tells_the_longest_round_of_its_warm_up_until_it_has_seen_a_real_one(sockets: Path) -> None:
    with running(sockets, Size(longest_chunk_s=1e6)) as loop:
        loop.front.send(Ping())
        assert loop.front.hear(Pong).longest_round_s == 1e6
        loop.submit("a", [1] * 200, 3)
        loop.until_over("a")
        loop.front.send(Ping())
        assert 0 < loop.front.hear(Pong).longest_round_s < 1e6


def test_a_loop_in_a_forward_answers_nothing_until_it_is_through(loop: Loop) -> None:
    loop.inside.runner.hold()
    loop.submit("a", [1] * 20, 1)
    loop.until_held()
    loop.front.send(Ping())
    assert not any(isinstance(message, Pong) for message in loop.front.seen)
    loop.inside.runner.release()
    assert loop.front.hear(Pong).num_tokens_computed == 20, "it was answered after the forward that it waited for"


REFUSED = {
    "too long for the context": ([1] * 500, 100, "InvalidRequest", "the context limit is 512"),
    "an empty prompt": ([], 1, "InvalidRequest", "prompt is empty"),
    "no token wanted": ([1], 0, "InvalidRequest", "max_new_tokens is 0"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_never_be_served_is_refused_with_the_value_and_the_next_one_is_served(loop: Loop, name: str) -> None:
    prompt, max_new_tokens, error, message = REFUSED[name]
    loop.submit("a", prompt, max_new_tokens)
    (output,) = loop.until_over("a")["a"]
    assert output.error_name == error
    assert message in output.error_message
    loop.submit("b", [1], 2)
    assert tokens(loop.until_over("b")["b"]) == expected([1], 2)


def test_without_a_block_left_the_newest_answer_fails_and_names_the_knob(sockets: Path) -> None:
    with running(sockets, Size(num_blocks=3, num_slots=2, answer_headroom=0)) as loop:
        prompts = [[1] * 60, [2] * 60]
        for name, prompt in zip("ab", prompts, strict=True):
            loop.submit(name, prompt, 100)
        outputs = loop.until_over("a", "b")
        assert tokens(outputs["a"]) == expected(prompts[0], 100)
        assert outputs["b"][-1].error_name == "NotReady"
        assert "Raise --host-kv-gb or --num-kv-blocks, or lower --max-num-seqs" in outputs["b"][-1].error_message
        load, integrity = loop.load()
        assert (load.num_held_blocks, load.counters["capacity_failures"], integrity) == (0, 1, "")


def test_an_aborted_request_is_told_so_and_its_blocks_are_free(loop: Loop) -> None:
    loop.inside.runner.hold(lambda plan: bool(plan.decode))
    loop.submit("a", [1] * 100, 50)
    loop.front.hear(Outputs)
    loop.front.send(Abort(RequestId("a")), Abort(RequestId("nobody")))
    loop.inside.runner.release()
    assert loop.until_over("a")["a"][-1].finish is FinishReason.ABORT
    load, integrity = loop.load()
    assert (load.num_held_blocks, load.num_running, integrity) == (0, 0, "")


def test_the_load_says_what_runs_and_what_waits(loop: Loop) -> None:
    loop.inside.runner.hold(lambda plan: len(plan.decode) == 4)
    for number in range(6):
        loop.submit(f"r{number}", [number] * 70, 100)
    wait_for(lambda: loop.journal.of(Held) or None)
    loop.front.send(AskLoad(1))
    loop.inside.runner.release()
    load = loop.front.hear(LoadReport).load
    assert (load.num_running, load.num_waiting, load.num_waiting_uncached_tokens) == (4, 2, 140)
    assert (load.num_blocks, load.num_held_blocks) == (16, 12)


def test_broken_tables_are_reported_and_the_loop_goes_on(loop: Loop) -> None:
    loop.inside.scheduler._pool._references[BlockId(3)] = 1
    assert loop.load()[1] == "block 3 has 1 references, 0 holders"
    assert loop.load(check_integrity=False)[1] == ""
    loop.inside.scheduler._pool._references[BlockId(3)] = 0
    assert loop.load()[1] == ""


@pytest.mark.parametrize("seed", range(3))
def test_every_accepted_request_ends_with_exactly_one_message(sockets: Path, seed: int) -> None:
    """Arrivals, refusals, aborts and a pool that is too small, as they come."""
    chance = random.Random(seed)
    size = Size(num_blocks=10, num_slots=3, max_model_len=512, answer_headroom=0)
    with running(sockets, size) as loop:
        prompts = {
            f"r{number}": [chance.randrange(256)] * chance.choice([0, 1, 63, 64, 200, 600]) for number in range(60)
        }
        for name, prompt in prompts.items():
            loop.submit(name, prompt, chance.choice([1, 5, 90]))
            if chance.random() < 0.3:
                loop.front.send(Abort(RequestId(chance.choice(list(prompts)))))
        outputs = loop.until_over(*prompts)
        ends = Counter(name for name, told in outputs.items() for o in told if o.finish is not None or o.error_name)
        assert set(ends.values()) == {1}
        for name, told in outputs.items():
            assert tokens(told) == expected(prompts[name], len(tokens(told)))
        load, integrity = loop.load()
        assert (load.num_held_blocks, load.num_running, load.num_waiting, integrity) == (0, 0, 0, "")
        assert not loop.inside.loop._live

"""The prefill policies in a real loop: which rounds prefill, what streams see of it, and that idle costs nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.engine.channel import RankChannel
from pdserve.engine.messages import FromRank, Outputs, Submit, ToRank
from pdserve.engine.rank import RankLoop
from pdserve.kv.storage import KVStorage
from pdserve.model.fake import FakeRunner
from pdserve.request import FUSED, RequestId, SamplingParams, TokenRequest
from pdserve.scheduler.config import CadenceLimits, SchedulerConfig
from pdserve.scheduler.gate import PrefillGate
from pdserve.scheduler.plan import RoundPlan
from pdserve.scheduler.scheduler import Scheduler
from tests.engine.loops import Loop, expected, running, tokens
from tests.engine.other_end import LIMIT_S, other_end
from tests.roles.cluster import prompt_of
from tests.roles.inside import BLOCK_SIZE, CHUNK, LAYOUT, VOCAB_SIZE, Size

A, N = 4, 16
GATED = Size(gate=(A, N, None))
STREAM = [9, 9, 9]
NUM_STREAMED = 60


def shape(plans: list[RoundPlan]) -> str:
    """One letter a forward: P with prefill, d without."""
    return "".join("P" if plan.prefill else "d" for plan in plans)


def serve_beside_a_stream(loop: Loop, *prompts: list[int]) -> str:
    """The shape of the rounds from the first that a stream decodes in; all prompts come while that one runs."""
    inside, is_decoding = loop.inside, threading.Event()

    def take_messages(plan: RoundPlan) -> bool:
        """In the loop's thread, during the first such forward: all prompts have come when it is over."""
        if plan.decode:
            is_decoding.set()
        while plan.decode and inside.scheduler._num_submissions < 1 + len(prompts):
            inside.loop._receive(wait=True)
        return False

    inside.runner.hold(take_messages)
    loop.submit("stream", STREAM, NUM_STREAMED)
    assert is_decoding.wait(LIMIT_S)
    names = [f"r{number}" for number in range(len(prompts))]
    for name, prompt in zip(names, prompts, strict=True):
        loop.submit(name, prompt, 2)
    outputs = loop.until_over("stream", *names)
    assert tokens(outputs["stream"]) == expected(STREAM, NUM_STREAMED)
    for name, prompt in zip(names, prompts, strict=True):
        assert tokens(outputs[name]) == expected(prompt, 2)
    return shape(loop.plans())[1:]


def test_without_a_policy_a_prompt_runs_at_once_and_in_one_go(sockets: Path) -> None:
    with running(sockets, Size()) as loop:
        assert serve_beside_a_stream(loop, prompt_of(3 * CHUNK)).startswith("dPPPd")
        assert not any(name.startswith("gate") for name in loop.counters())


def test_the_gate_holds_prompts_for_a_multiple_of_a_and_computes_them_together(sockets: Path) -> None:
    with running(sockets, GATED) as loop:
        assert serve_beside_a_stream(loop, prompt_of(20), prompt_of(30)).startswith("d" * A + "Pd")
        counters = loop.counters()
        assert (counters["prefill_rounds"], counters["gate_windows_all"], counters["gate_windows_idle"]) == (2, 1, 1)
        assert counters["gate_rounds_held"] == A - 1
        assert counters["gate_worst_wait_rounds"] == A


def test_one_prompt_of_many_chunks_runs_in_one_go_unless_the_gate_has_a_limit(sockets: Path) -> None:
    """The gate batches; what bounds a stall is its limit of rounds in a row, or a cadence."""
    with running(sockets, GATED) as loop:
        assert serve_beside_a_stream(loop, prompt_of(6 * CHUNK)).startswith("d" * A + "PPPPPPd")


def test_a_limit_of_rounds_in_a_row_lets_streams_on(sockets: Path) -> None:
    with running(sockets, Size(gate=(A, N, 2))) as loop:
        rounds = serve_beside_a_stream(loop, prompt_of(4 * CHUNK))
        assert rounds.startswith("d" * A + "PP" + "d" * A + "PPd")


CADENCES: dict[str, tuple[CadenceLimits, str]] = {
    # The stream's own prompt was a prefill round too, and some of its decode rounds were owed already.
    "one decode round after two chunks": (CadenceLimits(prefill_rounds=2), "dPPdPPdPPd"),
    "three decode rounds after each chunk": (CadenceLimits(prefill_rounds=1, decode_rounds=3), "dddPdddPdddP"),
    "until the prompt was held for four": (CadenceLimits(1, 3, hold_budget=4), "dddPddPPPPPd"),
}


@pytest.mark.parametrize("name", CADENCES)
def test_a_cadence_spaces_the_chunks_of_a_prompt(sockets: Path, name: str) -> None:
    limits, wanted = CADENCES[name]
    with running(sockets, Size(cadence=limits)) as loop:
        assert serve_beside_a_stream(loop, prompt_of(6 * CHUNK)).startswith(wanted)


# ---------------------------------------------------------------- tiers beside a gate


def test_a_gate_and_a_pool_that_is_too_small_give_the_answers_of_a_large_one(sockets: Path) -> None:
    size = Size(num_blocks=12, num_slots=6, num_host_blocks=64, answer_headroom=0, gate=(A, N, None))
    prompts = {f"r{number}": prompt_of(90 + 20 * number, number) for number in range(8)}
    with running(sockets, size) as loop:
        for name, prompt in prompts.items():
            loop.submit(name, prompt, 120)
        outputs = loop.until_over(*prompts)
        for name, prompt in prompts.items():
            assert tokens(outputs[name]) == expected(prompt, 120)
        counters = loop.until_idle()
        assert counters["retractions"] == counters["restores"] > 0
        assert counters["prompt_tokens_computed"] == sum(map(len, prompts.values()))


# ---------------------------------------------------------------- an idle rank


class ByHand:
    """A loop whose rounds the test makes, in its own thread."""

    def __init__(self, loop: RankLoop, submit: Callable[[str, int], None]) -> None:
        self.loop = loop
        self.submit = submit

    def rounds_until_it_would_wait(self) -> int:
        """Rounds from the messages that have come to the one after which only a message could change anything."""
        self.loop._receive(wait=True)
        num_rounds = 1
        self.loop.run_round()
        while not self.loop._group.is_asleep:
            self.loop.run_round()
            num_rounds += 1
            assert num_rounds < 1000, "it never waits"
        return num_rounds


def test_an_idle_gated_rank_waits_for_a_message_and_starts_with_it(sockets: Path) -> None:
    storage = KVStorage(LAYOUT, 16)
    scheduler = Scheduler(SchedulerConfig(16, BLOCK_SIZE, 4, CHUNK, 512, prefill_watermark=9))
    endpoint = f"ipc://{sockets}/loop"
    with other_end(endpoint, FromRank) as front:
        channel: RankChannel[ToRank, FromRank] = RankChannel(endpoint, ToRank)
        loop = RankLoop(scheduler, FakeRunner(storage, VOCAB_SIZE, 4, 512), channel, (), gate=PrefillGate(A, N))

        def submit(name: str, num_tokens: int) -> None:
            front.send(Submit(TokenRequest(RequestId(name), (1,), SamplingParams(num_tokens)), FUSED))

        hand = ByHand(loop, submit)
        loop.run_round()
        assert loop._group.is_asleep, "nothing was asked, and it does not wait"
        for number in range(1, 2 * A):  # whatever R was when the last stream ended
            before = scheduler.counters.rounds
            hand.submit(f"r{number}", number)
            # One round a token, and one that finds nothing left; the first of them prefilled.
            assert hand.rounds_until_it_would_wait() == number + 1
            assert scheduler.counters.rounds == before + number + 1
            assert len(front.hear(Outputs).outputs) == 1
        assert loop.load().counters["gate_worst_wait_rounds"] == 1
        channel.close()

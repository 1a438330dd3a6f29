"""The handoff breaks between any two messages: what the client is told is what it would have been told without."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass

import pytest

from pdserve.client.types import Answer
from pdserve.config import Role
from pdserve.errors import TransferFailed
from pdserve.rpc.handoff import Accepted, ChunkReady, FirstToken, Released, ToDecode
from tests.roles.cluster import Cluster, Node, prompt_of, settle, until_ready
from tests.roles.inside import CHUNK, Size, Started
from tests.roles.journal import LIMIT_S, Journal
from tests.roles.relay import Passed, Relay, relay_to

NUM_TOKENS = 12
SIZE = Size(has_sampler=True)
BROKEN = TransferFailed("told to")
# Only letters, so that an answer's text is its tokens.
LETTERS = dict.fromkeys(range(ord("a"), ord("z") + 1), 50.0)
# So few that the first token is bound to come again, if its penalty were forgotten.
FEW_LETTERS = dict.fromkeys(range(ord("a"), ord("d")), 50.0)

Breaks = Callable[[ToDecode], Sequence[Passed]]


def after(kind: type[ToDecode], seq: int | None = None) -> Breaks:
    """D hears this message, and nothing after it."""

    def change(said: ToDecode) -> Sequence[Passed]:
        is_last = isinstance(said, kind) and (seq is None or (isinstance(said, ChunkReady) and said.seq == seq))
        return [said, BROKEN] if is_last else [said]

    return change


def instead_of(kind: type[ToDecode]) -> Breaks:
    return lambda said: [BROKEN] if isinstance(said, kind) else [said]


BOUNDARIES: dict[str, Breaks] = {
    "before the start is answered": lambda said: [BROKEN],
    "after Accepted": after(Accepted),
    **{f"after chunk {seq}": after(ChunkReady, seq) for seq in range(3)},
    "after FirstToken": after(FirstToken),
    "between Release and Released": instead_of(Released),
}

OPTIONS: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0.0},
    "seed and temperature": {"temperature": 0.8, "seed": 5},
    "no seed": {"temperature": 0.8},
    "penalties": {"temperature": 0.0, "frequency_penalty": 1.5, "presence_penalty": 1.0, "logit_bias": FEW_LETTERS},
    "logprobs": {"temperature": 0.8, "seed": 9, "logprobs": True, "top_logprobs": 3, "prompt_logprobs": 2},
    "three samples": {"temperature": 0.8, "seed": 5, "num_samples": 3},
    "one token": {"temperature": 0.8, "seed": 5, "max_new_tokens": 1},
}


@dataclass(frozen=True)
class Broken:
    """A fused node as reference, and a pair whose control stream is broken as the test says."""

    fused: Node
    prefill: Node
    relay: Relay
    decode: Node
    journal: Journal


@pytest.fixture
async def broken(nodes: Cluster) -> AsyncIterator[Broken]:
    fused = await nodes.start(Role.FUSED, SIZE)
    prefill = await nodes.start_prefill(SIZE)
    async with relay_to(prefill, nodes.journal) as relay:
        decode = await nodes.decode_of(relay.address, size=SIZE)
        yield Broken(fused, prefill, relay, decode, nodes.journal)
        await settle(fused, prefill, decode)
        await decode.stop()


async def answers_of(node: Node, prompt: Sequence[int], options: dict[str, object]) -> list[dict[str, object]]:
    """All that a client is told, but for the answer's id, its cost, and where the prompt was prefilled."""
    wanted = {"max_new_tokens": NUM_TOKENS, "num_samples": 1, "logit_bias": LETTERS, **options}
    answers = await node.client.generate_samples(token_ids=prompt, timeout_s=LIMIT_S, **wanted)
    return [told(answer) for answer in sorted(answers, key=lambda answer: answer.index)]


def told(answer: Answer) -> dict[str, object]:
    return {name: value for name, value in asdict(answer).items() if name not in ("request_id", "placement", "usage")}


def prompt_number(number: int) -> list[int]:
    """Of three chunks; each its own, as none may be known to the decode node from another's fallback."""
    return prompt_of(2 * CHUNK + 10, number)


@pytest.mark.parametrize("boundary", BOUNDARIES)
async def test_a_handoff_that_breaks_between_two_messages_changes_nothing_that_is_said(
    broken: Broken, boundary: str
) -> None:
    for number, (name, options) in enumerate(OPTIONS.items()):
        prompt = prompt_number(number)
        num_started = len(broken.journal.of(Started))
        broken.relay.change = BOUNDARIES[boundary]
        disturbed = await answers_of(broken.decode, prompt, options)
        # Where the client gave none, the decode node drew one.
        (seed,) = {started.request.sampling.seed for started in broken.journal.of(Started)[num_started:]}
        assert disturbed == await answers_of(broken.fused, prompt, {**options, "seed": seed}), name
        await until_ready(broken.decode)
    assert (await broken.decode.counters())["decode_fallback_total"] >= len(OPTIONS) - 1, "a first token may be all"


@pytest.mark.parametrize("boundary", BOUNDARIES)
async def test_a_stop_string_across_the_first_two_tokens_is_found_wherever_the_handoff_breaks(
    broken: Broken, boundary: str
) -> None:
    options: dict[str, object] = {"temperature": 0.0}
    for number in range(2):
        prompt = prompt_number(number)
        (whole,) = await answers_of(broken.fused, prompt, options)
        text = str(whole["text"])
        stop = text[number : number + 2]
        broken.relay.change = BOUNDARIES[boundary]
        (answer,) = await answers_of(broken.decode, prompt, {**options, "stop": [stop]})
        assert answer["text"] == text[: text.index(stop)]
        await until_ready(broken.decode)

import asyncio
from collections.abc import Callable
from typing import TypeVar

import pytest

from pdserve.client import Client
from pdserve.errors import DeadlineExceeded, InvalidRequest, NotReady, QueueFull
from pdserve.request import FinishReason, TokenLogprobs
from pdserve.rpc.fake import BOS, CARD, EchoGenerator

T = TypeVar("T")


async def with_client(address: str, use: Callable[[Client], T]) -> T:
    """In a thread of its own, as the node lives in this one's event loop."""

    def run() -> T:
        with Client(address) as client:
            return use(client)

    return await asyncio.to_thread(run)


async def test_generate_gives_a_whole_answer(address: str) -> None:
    answer = await with_client(
        address, lambda c: c.generate("hi", max_new_tokens=3, logprobs=True, prompt_logprobs=0, request_id="r")
    )
    assert (answer.request_id, answer.text, answer.token_ids) == ("r", "hi", (BOS, 104, 105))
    assert answer.finish is FinishReason.LENGTH
    assert (answer.usage.num_prompt_tokens, answer.usage.num_completion_tokens) == (3, 3)
    assert answer.logprobs[1] == TokenLogprobs(104, -0.5, ((104, -0.5), (0, -2.0)))
    assert answer.prompt_logprobs == (TokenLogprobs(104, -1.0), TokenLogprobs(105, -1.0))
    assert answer.placement == "local;reason=fused"


async def test_samples_come_in_index_order(address: str) -> None:
    answers = await with_client(address, lambda c: c.generate_samples("hi", num_samples=3, max_new_tokens=2))
    assert [answer.index for answer in answers] == [0, 1, 2]
    assert {answer.placement for answer in answers} == {"local;reason=fused"}


async def test_a_stream_gives_pieces_and_its_placement(address: str) -> None:
    def use(client: Client) -> tuple[str, list[FinishReason | None], tuple[str, ...]]:
        with client.stream("hi", max_new_tokens=3) as stream:
            pieces = list(stream)
            return "".join(piece.text for piece in pieces), [piece.finish for piece in pieces], stream.placements

    text, finishes, placements = await with_client(address, use)
    assert text == "hi"
    assert finishes == [None, None, None, FinishReason.LENGTH]
    assert placements == ("local;reason=fused",)


@pytest.mark.parametrize("way", ["close", "leave", "drop"])
async def test_leaving_a_stream_aborts_the_request(address: str, generator: EchoGenerator, way: str) -> None:
    generator.hold_after = 1

    def use(client: Client) -> None:
        stream = client.stream("hi", request_id=way)
        next(stream)
        if way == "close":
            stream.close()
            assert list(stream) == []
        elif way == "leave":
            with stream:
                pass
        else:
            del stream
        # The connection stays open until the node has noticed.
        asyncio.run_coroutine_threadsafe(generator.closed.get(), loop).result()

    loop = asyncio.get_running_loop()
    await with_client(address, use)
    assert generator.requests[0].request_id == way


async def test_errors_are_the_ones_the_node_raised(address: str, generator: EchoGenerator) -> None:
    with pytest.raises(InvalidRequest, match="top_p is 2"):
        await with_client(address, lambda c: c.generate("hi", top_p=2.0))
    generator.failure = QueueFull("1024 requests wait, the limit is 1024", retry_after_s=0.05)
    with pytest.raises(QueueFull, match="1024 requests wait") as failure:
        await with_client(address, lambda c: c.generate("hi"))
    assert failure.value.retry_after_s == 0.05
    assert len(generator.requests) == 4, "tried again before the first token, as often as allowed"


async def test_a_deadline_is_an_error(address: str, generator: EchoGenerator) -> None:
    generator.hold_after = 1
    with pytest.raises(DeadlineExceeded):
        await with_client(address, lambda c: c.generate("hi", timeout_s=0.1))


async def test_nobody_there_is_not_ready() -> None:
    with pytest.raises(NotReady), Client("127.0.0.1:1", max_attempts=1) as client:
        client.model_info()


async def test_the_other_calls(address: str, generator: EchoGenerator) -> None:
    def use(client: Client) -> None:
        assert client.tokenize("hi") == (BOS, 104, 105)
        assert client.tokenize(messages=[{"role": "u", "content": ""}]) == tuple(b"u: \n")
        assert client.detokenize([104, 105]) == "hi"
        assert client.model_info() == CARD
        assert client.server_info().settings == {"max_num_seqs": "4"}
        assert client.loads()[0].num_blocks == 64
        assert not client.abort("nobody")

    await with_client(address, use)

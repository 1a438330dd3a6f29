import asyncio

import pytest

from pdserve.client import AsyncClient
from pdserve.errors import DeadlineExceeded, InternalError, NotReady, QueueFull, TransferFailed
from pdserve.request import FinishReason
from pdserve.rpc.fake import BOS, CARD, EchoGenerator, fake_node


async def test_generate_and_the_other_calls(address: str) -> None:
    async with AsyncClient(address) as client:
        assert (await client.generate("hi", max_new_tokens=3)).text == "hi"
        answers = await client.generate_samples(token_ids=[65], num_samples=2, max_new_tokens=2)
        assert [answer.text for answer in answers] == ["AA", "AA"]
        assert await client.tokenize("hi", add_special_tokens=True) == (BOS, 104, 105)
        assert await client.detokenize([BOS], skip_special_tokens=False) == "<s>"
        assert await client.model_info() == CARD
        assert (await client.server_info()).uptime_s >= 0
        assert len(await client.loads()) == 1


async def test_a_stream_ends_with_its_finish_and_tells_its_placement(address: str) -> None:
    async with AsyncClient(address) as client, client.stream("hi", max_new_tokens=2) as stream:
        assert [piece.finish async for piece in stream] == [None, None, FinishReason.LENGTH]
        assert await stream.placements() == ("local;reason=fused",)


async def test_a_closed_stream_is_over_and_its_request_aborted(address: str, generator: EchoGenerator) -> None:
    generator.hold_after = 1
    async with AsyncClient(address) as client:
        async with client.stream("hi", request_id="a") as stream:
            await anext(stream)
        assert await generator.closed.get() == "a"
        assert [piece async for piece in stream] == []


async def test_cancelling_a_task_aborts_its_request(address: str, generator: EchoGenerator) -> None:
    generator.hold_after = 1
    async with AsyncClient(address) as client:
        task = asyncio.create_task(client.generate("hi", request_id="a"))
        assert await generator.held.get() == "a"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await generator.closed.get() == "a"


async def test_somebody_elses_abort_ends_an_answer(address: str, generator: EchoGenerator) -> None:
    generator.hold_after = 2
    async with AsyncClient(address) as client:
        task = asyncio.create_task(client.generate("hi", request_id="a"))
        await generator.held.get()
        assert await client.abort("a")
        answer = await task
    assert answer.finish is FinishReason.ABORT
    assert answer.token_ids == (BOS, 104)


async def test_failures_before_the_first_token_are_retried_and_later_ones_never(
    address: str, generator: EchoGenerator
) -> None:
    async with AsyncClient(address) as client:
        generator.failure = QueueFull("full", retry_after_s=0.01)
        task = asyncio.create_task(client.generate("hi", max_new_tokens=3))
        await generator.closed.get()
        generator.failure = None
        assert (await task).text == "hi"
        assert len(generator.requests) == 2
        generator.failure, generator.fail_after = TransferFailed("the peer died"), 1
        stream = client.stream("hi")
        await anext(stream)
        with pytest.raises(TransferFailed, match="the peer died"):
            await anext(stream)
        assert len(generator.requests) == 3
        with pytest.raises(TransferFailed):
            await client.generate("a whole answer, of which the first token is lost too")
        assert len(generator.requests) == 4


async def test_errors_of_the_node_itself(address: str, generator: EchoGenerator) -> None:
    async with AsyncClient(address, timeout_s=0.1) as client:
        generator.hold_after = 1
        with pytest.raises(DeadlineExceeded):
            await client.generate("hi")
        generator.hold_after, generator.failure = None, ZeroDivisionError()
        with pytest.raises(InternalError, match="internal error"):
            await client.generate("hi", timeout_s=10)


async def test_several_nodes_share_the_requests_and_one_that_goes_is_passed_over() -> None:
    first, second = EchoGenerator(), EchoGenerator()
    async with fake_node(second) as stays:
        async with fake_node(first) as goes, AsyncClient([goes, stays], timeout_s=30) as client:
            await both_served(client, first, second)
        async with AsyncClient([goes, stays], timeout_s=30) as client:
            for _ in range(4):
                assert (await client.generate("hi", max_new_tokens=3)).text == "hi"


async def both_served(client: AsyncClient, first: EchoGenerator, second: EchoGenerator) -> None:
    """Until the channel has found both nodes healthy, one of them may get everything."""
    async with asyncio.timeout(20):
        while not (first.requests and second.requests):
            await client.generate("hi", max_new_tokens=1)


async def test_nobody_there_is_not_ready() -> None:
    async with AsyncClient("127.0.0.1:1", max_attempts=1) as client:
        with pytest.raises(NotReady):
            await client.generate("hi")

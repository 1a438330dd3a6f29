"""A request's samples: started, merged, cut at stop strings, ended and closed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

import pytest

from pdserve.engine import text_generator
from pdserve.engine.text_generator import TextGenerator
from pdserve.errors import InternalError, NotReady, RequestIdInUse
from pdserve.request import (
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    RankLoad,
    RequestId,
    SamplingParams,
    TokenDelta,
    TokenLogprobs,
    TokenRequest,
)

STOP, LENGTH, ABORT = FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT


class Letters:
    """Token 97 is `a`."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(token) for token in token_ids)


class ScriptedSource:
    """Streams fed by hand, by request id. Reads one step at a time, so an unread delta stays in its queue."""

    def __init__(self) -> None:
        self.requests: list[TokenRequest] = []
        self.closed: list[str] = []
        self.steps: dict[str, asyncio.Queue[TokenDelta | Exception | None]] = {}
        self.started = asyncio.Condition()

    async def stream(self, request: TokenRequest) -> AsyncGenerator[TokenDelta, None]:
        self.requests.append(request)
        steps = self.steps[request.request_id] = asyncio.Queue()
        async with self.started:
            self.started.notify_all()
        try:
            while (step := await steps.get()) is not None:
                if isinstance(step, Exception):
                    raise step
                yield step
        finally:
            self.closed.append(request.request_id)

    async def abort(self, request_id: RequestId) -> bool:
        if request_id not in self.steps:
            return False
        self.steps[request_id].put_nowait(TokenDelta((), finish=ABORT))
        return True

    async def loads(self, *, check_integrity: bool = False) -> Sequence[RankLoad]:
        return [RankLoad(0, 1, 0, 0, 8, 2, 0)]

    async def feed(self, request_id: str, *steps: TokenDelta | Exception | None) -> None:
        async with self.started:
            await self.started.wait_for(lambda: request_id in self.steps)
        for step in steps:
            self.steps[request_id].put_nowait(step)


def words(text: str, finish: FinishReason | None = None, **more: int) -> TokenDelta:
    return TokenDelta(tuple(map(ord, text)), finish=finish, **more)


def a_request(num_samples: int = 1, stop: tuple[str, ...] = (), **sampling: int) -> GenerateRequest:
    params = SamplingParams(max_new_tokens=16, seed=7, sample_index=3, prompt_logprobs=1, **sampling)
    return GenerateRequest(RequestId("r"), (1, 2, 3), params, num_samples, stop, priority=4)


async def all_of(chunks: AsyncIterator[GenerateChunk]) -> list[GenerateChunk]:
    return [chunk async for chunk in chunks]


@pytest.fixture
def source() -> ScriptedSource:
    return ScriptedSource()


@pytest.fixture
def generator(source: ScriptedSource) -> TextGenerator:
    return TextGenerator(source, Letters())


class TestOneSample:
    async def test_each_delta_is_passed_on_at_once_with_its_text(
        self, source: ScriptedSource, generator: TextGenerator
    ) -> None:
        chunks = generator.generate(a_request())
        reading = asyncio.ensure_future(anext(chunks))
        logprobs = (TokenLogprobs(97, -0.5),)
        first = TokenDelta((97,), logprobs=logprobs, num_cached_tokens=2, placement="local;reason=fused")
        await source.feed("r", first)
        assert await reading == GenerateChunk(0, first, "a", 1)
        await source.feed("r", words("bc"), words("d", LENGTH))
        assert await all_of(chunks) == [
            GenerateChunk(0, words("bc"), "bc", 3),
            GenerateChunk(0, words("d", LENGTH), "d", 4),
        ]
        assert source.closed == ["r"]

    async def test_the_source_gets_the_request_as_sample_0(
        self, source: ScriptedSource, generator: TextGenerator
    ) -> None:
        reading = asyncio.ensure_future(all_of(generator.generate(a_request())))
        await source.feed("r", words("a", LENGTH))
        await reading
        params = SamplingParams(max_new_tokens=16, seed=7, sample_index=0, prompt_logprobs=1)
        assert source.requests == [TokenRequest(RequestId("r"), (1, 2, 3), params, priority=4)]

    async def test_a_stop_token_is_reported_but_is_no_text(
        self, source: ScriptedSource, generator: TextGenerator
    ) -> None:
        reading = asyncio.ensure_future(all_of(generator.generate(a_request())))
        end = words("ab", STOP, matched_stop_token=ord("b"))
        await source.feed("r", end)
        assert await reading == [GenerateChunk(0, end, "a", 2, ord("b"))]

    async def test_a_stop_string_ends_the_sample_and_closes_its_stream(
        self, source: ScriptedSource, generator: TextGenerator
    ) -> None:
        chunks = generator.generate(a_request(stop=("xyz",)))
        reading = asyncio.ensure_future(anext(chunks))
        await source.feed("r", words("ax"), words("yzb"), words("c"))
        assert await reading == GenerateChunk(0, words("ax"), "a", 2)
        last = await anext(chunks)
        assert last == GenerateChunk(0, words("yzb", STOP), "", 5, "xyz")
        assert source.closed == ["r"]  # before the reader asks for more
        assert await all_of(chunks) == []

    async def test_held_text_is_let_go_at_the_end(self, source: ScriptedSource, generator: TextGenerator) -> None:
        reading = asyncio.ensure_future(all_of(generator.generate(a_request(stop=("xyz",)))))
        await source.feed("r", words("axy"), words("", ABORT))
        assert [chunk.text for chunk in await reading] == ["a", "xy"]

    async def test_stop_strings_wait_for_min_new_tokens(self, source: ScriptedSource, generator: TextGenerator) -> None:
        reading = asyncio.ensure_future(all_of(generator.generate(a_request(stop=("x",), min_new_tokens=2))))
        await source.feed("r", words("xx"), words("ax"))
        assert "".join(chunk.text for chunk in await reading) == "xxa"

    async def test_tokens_that_end_without_a_finish_are_our_fault(
        self, source: ScriptedSource, generator: TextGenerator
    ) -> None:
        reading = asyncio.ensure_future(all_of(generator.generate(a_request())))
        await source.feed("r", words("a"), None)
        with pytest.raises(InternalError, match="'r'"):
            await reading


class TestSeveralSamples:
    async def test_the_others_start_once_the_first_has_tokens(
        self, source: ScriptedSource, generator: TextGenerator
    ) -> None:
        chunks = generator.generate(a_request(3))
        reading = asyncio.ensure_future(anext(chunks))
        await source.feed("r#0")
        assert [r.request_id for r in source.requests] == ["r#0"]
        await source.feed("r#0", words("a"))
        assert (await reading).index == 0
        await source.feed("r#1", words("b", LENGTH))
        await source.feed("r#2", words("c", LENGTH))
        await source.feed("r#0", words("a", LENGTH))
        rest = await all_of(chunks)
        assert sorted((c.index, c.text, c.num_output_tokens) for c in rest) == [(0, "a", 2), (1, "b", 1), (2, "c", 1)]
        assert [(r.sampling.sample_index, r.sampling.prompt_logprobs) for r in source.requests] == [
            (0, 1),
            (1, None),
            (2, None),
        ]

    async def test_each_has_its_own_text_and_stop(self, source: ScriptedSource, generator: TextGenerator) -> None:
        reading = asyncio.ensure_future(all_of(generator.generate(a_request(2, stop=("xy",)))))
        await source.feed("r#0", words("ax"))
        await source.feed("r#1", words("y"), words("bxy"))
        await source.feed("r#0", words("b", LENGTH))
        texts = ["", ""]
        for chunk in await reading:
            texts[chunk.index] += chunk.text
        assert texts == ["axb", "yb"]
        assert sorted(source.closed) == ["r#0", "r#1"]

    async def test_an_error_in_one_ends_all(self, source: ScriptedSource, generator: TextGenerator) -> None:
        reading = asyncio.ensure_future(all_of(generator.generate(a_request(3))))
        await source.feed("r#0", words("a"))
        await source.feed("r#1", NotReady("rank lost"))
        with pytest.raises(NotReady, match="rank lost"):
            await reading
        assert sorted(source.closed) == ["r#0", "r#1", "r#2"]

    async def test_an_error_before_the_first_token_starts_no_other(
        self, source: ScriptedSource, generator: TextGenerator
    ) -> None:
        reading = asyncio.ensure_future(all_of(generator.generate(a_request(3))))
        await source.feed("r#0", NotReady("draining"))
        with pytest.raises(NotReady):
            await reading
        assert [r.request_id for r in source.requests] == ["r#0"]

    async def test_a_slow_reader_holds_the_source(
        self, source: ScriptedSource, generator: TextGenerator, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(text_generator, "MAX_BUFFERED_CHUNKS", 2)
        chunks = generator.generate(a_request(2))
        reading = asyncio.ensure_future(anext(chunks))
        await source.feed("r#0", *(words("a") for _ in range(50)))
        await reading
        for _ in range(200):
            await asyncio.sleep(0)
        assert source.steps["r#0"].qsize() >= 45
        await chunks.aclose()


class TestEnds:
    @pytest.mark.parametrize("num_samples", [1, 3])
    async def test_closing_closes_every_stream(
        self, source: ScriptedSource, generator: TextGenerator, num_samples: int
    ) -> None:
        names = ["r"] if num_samples == 1 else ["r#0", "r#1", "r#2"]
        chunks = generator.generate(a_request(num_samples))
        reading = asyncio.ensure_future(anext(chunks))
        await source.feed(names[0], words("a"))
        await reading
        for name in names[1:]:
            await source.feed(name)
        await chunks.aclose()
        assert sorted(source.closed) == names

    @pytest.mark.parametrize("num_samples", [1, 2])
    async def test_a_cancelled_reader_closes_every_stream(
        self, source: ScriptedSource, generator: TextGenerator, num_samples: int
    ) -> None:
        name = "r" if num_samples == 1 else "r#0"
        reading = asyncio.ensure_future(all_of(generator.generate(a_request(num_samples))))
        await source.feed(name)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        assert source.closed == [name]
        assert not await generator.abort(RequestId("r"))

    async def test_abort_ends_every_sample_once_with_abort(
        self, source: ScriptedSource, generator: TextGenerator
    ) -> None:
        reading = asyncio.ensure_future(all_of(generator.generate(a_request(2))))
        await source.feed("r#0", words("a"))
        await source.feed("r#1", words("b"))
        assert await generator.abort(RequestId("r"))
        ends = [(c.index, c.delta.finish) for c in await reading if c.delta.finish is not None]
        assert sorted(ends) == [(0, ABORT), (1, ABORT)]

    async def test_abort_before_the_first_token_starts_no_other_sample(
        self, source: ScriptedSource, generator: TextGenerator
    ) -> None:
        reading = asyncio.ensure_future(all_of(generator.generate(a_request(3))))
        await source.feed("r#0")
        assert await generator.abort(RequestId("r"))
        assert sorted((c.index, c.delta.finish, c.text) for c in await reading) == [(i, ABORT, "") for i in range(3)]
        assert [r.request_id for r in source.requests] == ["r#0"]

    async def test_abort_of_what_does_not_live(self, generator: TextGenerator) -> None:
        assert not await generator.abort(RequestId("nobody"))


class TestRequestIds:
    @pytest.mark.parametrize("other", ["r", "r#1"])
    async def test_an_id_of_a_live_request_or_sample_is_refused(
        self, source: ScriptedSource, generator: TextGenerator, other: str
    ) -> None:
        reading = asyncio.ensure_future(all_of(generator.generate(a_request(2))))
        await source.feed("r#0")
        same = GenerateRequest(RequestId(other), (1,), SamplingParams(max_new_tokens=1))
        with pytest.raises(RequestIdInUse, match=f"'{other}'"):
            await all_of(generator.generate(same))
        await source.feed("r#0", words("a", LENGTH))
        await source.feed("r#1", words("a", LENGTH))
        assert len(await reading) == 2

    async def test_an_id_is_free_after_its_request(self, source: ScriptedSource, generator: TextGenerator) -> None:
        for _ in range(2):
            source.steps.clear()
            reading = asyncio.ensure_future(all_of(generator.generate(a_request())))
            await source.feed("r", words("a", LENGTH))
            assert len(await reading) == 1


async def test_loads_are_the_sources(generator: TextGenerator) -> None:
    assert [load.num_held_blocks for load in await generator.loads()] == [2]

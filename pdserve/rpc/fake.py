"""A Generator and a Tokenizer that need no model, and a node made of them, for tests of what lies above."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager

from pdserve.errors import RequestIdInUse
from pdserve.request import FinishReason, GenerateChunk, GenerateRequest, RankLoad, RequestId, TokenDelta, TokenLogprobs
from pdserve.rounds import NUM_KEPT, RankRounds, Round
from pdserve.rpc.admin import admin_service
from pdserve.rpc.generator import RoundSource
from pdserve.rpc.inference import InferenceServicer, inference_service
from pdserve.rpc.limits import Limits, ModelCard
from pdserve.rpc.server import RpcServer

EOS, BOS = 256, 257
CARD = ModelCard("fake", "FakeForCausalLM", max_model_len=8192, vocab_size=258, eos_token_ids=(EOS,), revision="r0")


class ByteTokenizer:
    """One token a byte; BOS before a text when special tokens are wanted."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS, *text.encode()] if add_special_tokens else list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        special = {EOS: "</s>", BOS: "<s>"}
        parts = ("" if skip_special_tokens and t in special else special.get(t, chr(t)) for t in token_ids)
        return "".join(parts)

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> str:
        return "".join(f"{message['role']}: {message['content']}\n" for message in messages)


class EchoGenerator:
    """Answers each sample with the prompt, over and over, one token a chunk, up to max_new_tokens.

    hold_after: every answer waits after this many tokens until it is aborted or closed.
    failure: raised after `fail_after` tokens of each answer.
    """

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.closed: asyncio.Queue[RequestId] = asyncio.Queue()
        self.held: asyncio.Queue[RequestId] = asyncio.Queue()
        self.hold_after: int | None = None
        self.failure: Exception | None = None
        self.fail_after = 0
        self.placement = "local;reason=fused"
        self._aborts: dict[RequestId, asyncio.Event] = {}

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateChunk, None]:
        if request.request_id in self._aborts:
            raise RequestIdInUse(f"request_id {request.request_id} is in use; choose another")
        self.requests.append(request)
        aborted = self._aborts[request.request_id] = asyncio.Event()
        try:
            for position in range(request.sampling.max_new_tokens):
                if self.failure is not None and position == self.fail_after:
                    raise self.failure
                if position == self.hold_after:
                    self.held.put_nowait(request.request_id)
                    await aborted.wait()
                for index in range(request.num_samples):
                    yield self._chunk(request, index, position, is_aborted=aborted.is_set())
                if aborted.is_set():
                    return
        finally:
            del self._aborts[request.request_id]
            self.closed.put_nowait(request.request_id)

    async def abort(self, request_id: RequestId) -> bool:
        aborted = self._aborts.get(request_id)
        if aborted is not None:
            aborted.set()
        return aborted is not None

    async def loads(self, *, check_integrity: bool = False) -> Sequence[RankLoad]:
        return (RankLoad(0, len(self._aborts), 0, 0, 64, 3, 5, counters={"rounds": len(self.requests)}),)

    def _chunk(self, request: GenerateRequest, index: int, position: int, *, is_aborted: bool) -> GenerateChunk:
        if is_aborted:
            return GenerateChunk(
                index, TokenDelta((), finish=FinishReason.ABORT, placement=self.placement), "", position
            )
        sampling = request.sampling
        token = request.prompt[position % len(request.prompt)]
        is_first, is_last = position == 0, position == sampling.max_new_tokens - 1
        has_prompt_logprobs = is_first and sampling.prompt_logprobs is not None
        delta = TokenDelta(
            (token,),
            logprobs=() if sampling.num_logprobs is None else (TokenLogprobs(token, -0.5, ((token, -0.5), (0, -2.0))),),
            finish=FinishReason.LENGTH if is_last else None,
            num_cached_tokens=1 if is_first else 0,
            prompt_logprobs=tuple(TokenLogprobs(t, -1.0) for t in request.prompt[1:]) if has_prompt_logprobs else None,
            placement=self.placement if is_first else "",
        )
        text = "" if token >= EOS else chr(token)
        return GenerateChunk(index, delta, text, position + 1)


class FakeRounds:
    """Ranks that remember the rounds they are given. failure: raised by all of them from then on."""

    def __init__(self, num_ranks: int = 1, size: int = NUM_KEPT) -> None:
        self._rounds: list[list[Round]] = [[] for _ in range(num_ranks)]
        self._size = size
        self.num_questions = 0
        self.failure: Exception | None = None

    def add(self, rank: int, *rounds: Round) -> None:
        """Numbered from 1, one after the other."""
        self._rounds[rank] += rounds

    def __len__(self) -> int:
        return len(self._rounds)

    async def rounds(self, number: int, *, after: int | None, most: int) -> RankRounds:
        self.num_questions += 1
        if self.failure is not None:
            raise self.failure
        rounds = self._rounds[number]
        first = max(after or 0, len(rounds) - min(most, self._size))
        num_lost = 0 if after is None else first - after
        return RankRounds(number, len(rounds), tuple(rounds[first:]), num_lost, unix_offset_us=1_000_000)


@asynccontextmanager
async def fake_node(
    generator: EchoGenerator, limits: Limits | None = None, port: int = 0, rounds: RoundSource | None = None
) -> AsyncIterator[str]:
    """A serving node on a free port of this machine; its address."""
    servicer = InferenceServicer(generator, ByteTokenizer(), CARD, limits, settings={"max_num_seqs": "4"})
    services = [inference_service(servicer), admin_service(rounds or FakeRounds())]
    server = RpcServer(services, port=port)
    address = f"127.0.0.1:{await server.start()}"
    await server.set_serving(True)
    try:
        yield address
    finally:
        await server.stop(grace_s=0)

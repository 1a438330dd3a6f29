"""The requests of a chaos run: of every kind, each with one right answer. A seed is a workload."""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

from pdserve.bench.handoff_witness import Phase
from pdserve.bench.tiny_model import NUM_BYTES
from pdserve.client import AsyncClient, GenerateOptions, Piece
from pdserve.errors import PdserveError
from pdserve.request import FinishReason, TokenLogprobs

# Share of the prompts, and the range their lengths are drawn from.
LENGTHS = ((0.3, 2, 64), (0.5, 64, 600), (0.2, 600, 1600))
NEW_TOKENS = (8, 48)
SHARED_SHARE, SHARED_TOKENS = 0.2, 128
# Far beyond what any fault costs a request: who takes longer hangs. A model that is slow in itself gets as much as its
# slowest answer took a node that nothing disturbed, so many times.
HANG_S, HANG_TIMES = 120.0, 5
UNDISTURBED_S = 900.0


class Kind(enum.Enum):
    GREEDY = "greedy"
    SEEDED = "temperature 0.8, seeded"
    LOGPROBS = "logprobs"
    SAMPLES = "n = 3"
    STOP = "stop string"
    ONE = "max_tokens 1"


SHARES = {Kind.GREEDY: 4, Kind.SEEDED: 2, Kind.LOGPROBS: 1, Kind.SAMPLES: 1, Kind.STOP: 1, Kind.ONE: 1}


@dataclass(frozen=True, slots=True)
class ChaosAsk:
    """options: all but the prompt and the request's name."""

    number: int
    kind: Kind
    prompt: tuple[int, ...]
    options: GenerateOptions
    num_samples: int = 1

    @property
    def name(self) -> str:
        return f"chaos-{self.number}"


def make_chaos_asks(num_asks: int, seed: int) -> list[ChaosAsk]:
    random = Random(f"chaos {seed}")
    shared = tuple(random.randrange(NUM_BYTES) for _ in range(SHARED_TOKENS))
    return [_ask(number, shared, random) for number in range(num_asks)]


def _ask(number: int, shared: tuple[int, ...], random: Random) -> ChaosAsk:
    kind = random.choices(list(SHARES), list(SHARES.values()))[0]
    (_, low, high) = random.choices(LENGTHS, [share for share, _, _ in LENGTHS])[0]
    body = tuple(random.randrange(NUM_BYTES) for _ in range(random.randint(low, high)))
    prompt = (*shared, *body) if random.random() < SHARED_SHARE else body
    num_samples = 3 if kind is Kind.SAMPLES else 1
    return ChaosAsk(number, kind, prompt, _options(kind, random), num_samples)


def _options(kind: Kind, random: Random) -> GenerateOptions:
    options: GenerateOptions = {"max_new_tokens": random.randint(*NEW_TOKENS), "temperature": 0.0}
    match kind:
        case Kind.SEEDED | Kind.SAMPLES:
            options |= {"temperature": 0.8, "seed": random.randrange(1 << 30)}
        case Kind.LOGPROBS:
            options |= {"logprobs": True, "top_logprobs": 3}
        case Kind.STOP:
            # Any two letters in a row: some answers end by one, across whatever boundary it falls.
            options |= {"stop": [chr(random.randrange(97, 123)) for _ in range(6)]}
        case Kind.ONE:
            options |= {"max_new_tokens": 1}
        case Kind.GREEDY:
            pass
    return options


@dataclass(slots=True)
class Sample:
    """What came of one sample so far. finish: None while it goes on, or for good where it never came."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: FinishReason | None = None

    def add(self, piece: Piece) -> None:
        self.token_ids += piece.token_ids
        self.text += piece.text
        self.logprobs += piece.logprobs
        self.finish = piece.finish or self.finish


@dataclass(slots=True)
class Attempted:
    """One request on its way, and what came of it. Times are seconds on this process' monotonic clock.

    hang_s: how long it may take.

    phase: as its caller sees it; the witness knows better until its KV has come. first_s: of its first piece.
    """

    ask: ChaosAsk
    target: str
    hang_s: float
    started_s: float
    samples: list[Sample]
    ended_s: float | None = None
    first_s: float | None = None
    error: PdserveError | None = None
    has_left: bool = False
    placements: tuple[str, ...] = ()
    task: asyncio.Task[None] | None = None

    @property
    def phase(self) -> Phase:
        return Phase.QUEUED if self.first_s is None else Phase.DECODING

    @property
    def is_complete(self) -> bool:
        return self.error is None and not self.has_left and all(sample.finish for sample in self.samples)

    @property
    def is_hung(self) -> bool:
        return self.ended_s is not None and self.ended_s - self.started_s >= self.hang_s

    def leave(self) -> None:
        """As a caller who goes away."""
        self.has_left = True
        if self.task is not None:
            self.task.cancel()


def hang_s_of(references: Iterable[Attempted]) -> float:
    """How long the same requests may take among faults."""
    took_s = [reference.ended_s - reference.started_s for reference in references if reference.ended_s is not None]
    return max(HANG_S, HANG_TIMES * max(took_s, default=0.0))


def attempt(ask: ChaosAsk, target: str, hang_s: float) -> Attempted:
    return Attempted(ask, target, hang_s, time.monotonic(), [Sample() for _ in range(ask.num_samples)])


async def follow(client: AsyncClient, attempted: Attempted, *, with_runners_up: bool = False) -> None:
    """To the answer's end, an error, or until its caller leaves; never raises for any of these.

    with_runners_up: the two best tokens of each position too, whatever the request asked for.
    """
    ask = attempted.ask
    options: GenerateOptions = {**ask.options, "token_ids": ask.prompt, "request_id": ask.name}
    if with_runners_up:
        options |= {"logprobs": True, "top_logprobs": max(2, options.get("top_logprobs", 0))}
    attempted.task = asyncio.current_task()
    try:
        async with client.stream(num_samples=ask.num_samples, timeout_s=attempted.hang_s, **options) as stream:
            async for piece in stream:
                attempted.first_s = attempted.first_s or time.monotonic()
                attempted.samples[piece.index].add(piece)
            attempted.placements = await stream.placements()
    except PdserveError as error:
        attempted.error = error
    except asyncio.CancelledError:
        if not attempted.has_left:
            raise
    finally:
        attempted.ended_s = time.monotonic()

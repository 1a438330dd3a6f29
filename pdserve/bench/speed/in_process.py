"""The engine alone: its scheduler and its runner in this process, without a front, a channel or a wire."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdserve.bench.listening import Call, Heard
from pdserve.config import Quantization, cache_dir
from pdserve.kv.layout import KVLayout
from pdserve.kv.storage import KVStorage
from pdserve.model.attention.native_cpu import NativeAttention
from pdserve.model.attention.torch_cpu import TorchAttention
from pdserve.model.batch import SlotTable
from pdserve.model.linear import Linear
from pdserve.model.model_config import ModelConfig, read_config
from pdserve.model.native_layers import NativeLayers
from pdserve.model.quantized_linear import QuantizedLinear
from pdserve.model.runner import RoundResult
from pdserve.model.sampler import Sampler
from pdserve.model.torch_runner import TorchRunner, load
from pdserve.model.weight_form import choose_kv_dtype
from pdserve.request import RequestId, SamplingParams, TokenLogprobs, TokenRequest
from pdserve.scheduler.config import SchedulerConfig
from pdserve.scheduler.plan import Outcome, StepDone, Submission, TokenDrawn
from pdserve.scheduler.scheduler import Scheduler

BLOCK_SIZE = 64
CHUNK = 512


# Where a round's time goes, by what is called for it; the rest is Python and torch's small operations.
PARTS: tuple[tuple[type, str, str], ...] = (
    (Linear, "__call__", "matrices"),
    (QuantizedLinear, "__call__", "matrices"),
    (NativeAttention, "run", "attention"),
    (TorchAttention, "run", "attention"),
    (Sampler, "draw", "sampling"),
    (SlotTable, "build", "batch"),
)


@dataclass(slots=True)
class Profile:
    """Seconds of all rounds, and of the parts of them that are told apart."""

    rounds_s: float = 0.0
    num_rounds: int = 0
    parts_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The parts' time is taken meanwhile, at some cost of its own: 0.3 us a call."""
        timed: list[tuple[type, str, Callable[..., Any]]] = [
            (owner, name, self._timed(part, getattr(owner, name))) for owner, name, part in PARTS
        ]
        timed.append((NativeLayers, "run", self._taken_apart(NativeLayers.run)))
        originals = [(owner, name, getattr(owner, name)) for owner, name, _ in timed]
        for owner, name, call in timed:
            setattr(owner, name, call)
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)

    def shares(self) -> dict[str, float]:
        """Of the rounds' time; what is told apart nowhere is "other"."""
        parts = {part: seconds / self.rounds_s for part, seconds in self.parts_s.items()}
        return parts | {"other": 1.0 - sum(parts.values())}

    def _timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            result = call(*args, **kwargs)
            self._add(part, time.perf_counter() - start_s)
            return result

        return timed

    def _taken_apart(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """All layers in one call, which keeps the time of its parts itself."""

        def timed(layers: NativeLayers, *args: Any) -> Any:
            before = layers.seconds()
            result = run(layers, *args)
            for part, seconds in layers.seconds().items():
                self._add(part, seconds - before[part])
            return result

        return timed

    def _add(self, part: str, seconds: float) -> None:
        self.parts_s[part] = self.parts_s.get(part, 0.0) + seconds


def kv_layout(config: ModelConfig, quantization: Quantization) -> KVLayout:
    """As nodes have it where nothing else is asked for."""
    return config.kv_layout(BLOCK_SIZE, choose_kv_dtype("auto", quantization))


def load_runner(
    directory: Path, storage: KVStorage, quantization: Quantization, max_num_seqs: int, num_threads: int
) -> TorchRunner:
    """storage: of blocks of BLOCK_SIZE."""
    config = read_config(directory)
    return load(
        directory,
        config,
        storage,
        max_slots=max_num_seqs,
        max_model_len=config.max_position_embeddings,
        cache_dir=cache_dir(),
        num_threads=num_threads,
        quantization=quantization,
    )


class Engine:
    """A model with as much KV as the requests of one cell need."""

    def __init__(
        self,
        directory: Path,
        quantization: Quantization = "fp32",
        *,
        max_tokens: int,
        max_num_seqs: int,
        num_threads: int,
    ) -> None:
        """max_tokens: of all requests that are served at once."""
        config = read_config(directory)
        num_blocks = max_tokens // BLOCK_SIZE + 2 * max_num_seqs
        storage = KVStorage(kv_layout(config, quantization), num_blocks)
        start_s = time.monotonic()
        self._runner = load_runner(directory, storage, quantization, max_num_seqs, num_threads)
        self.quantization = quantization
        self.loaded_s = time.monotonic() - start_s
        self._config = SchedulerConfig(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            max_batch_size=max_num_seqs,
            max_scheduled_tokens=CHUNK,
            max_model_len=config.max_position_embeddings,
        )
        self.profile = Profile()

    def hear_all(self, calls: Sequence[Call]) -> list[Heard]:
        """All of them at once, each to its end; a round's tokens arrive as it ends."""
        scheduler = Scheduler(self._config)
        requests = {}
        for call in calls:
            sampling = SamplingParams(max_new_tokens=call.num_output_tokens, temperature=0.0, ignore_eos=True)
            request = TokenRequest(RequestId(str(call.number)), call.prompt, sampling)
            requests[request.request_id] = request
            scheduler.submit(Submission(request.request_id, request.prompt, call.num_output_tokens))
        called_s = time.monotonic()
        arrivals_s: dict[RequestId, list[float]] = {request_id: [] for request_id in requests}
        while scheduler.has_work:
            for outcome in self._round(scheduler, requests)[1]:
                if isinstance(outcome, TokenDrawn):
                    arrivals_s[outcome.request_id].append(time.monotonic())
        return [Heard(call.number, called_s, tuple(arrivals_s[RequestId(str(call.number))])) for call in calls]

    def read(self, tokens: Sequence[int]) -> list[TokenLogprobs]:
        """Of each token but the first, after those before it: its log probability, and the most likely token's."""
        scheduler = Scheduler(self._config)
        sampling = SamplingParams(max_new_tokens=1, temperature=0.0, prompt_logprobs=1)
        request = TokenRequest(RequestId("text"), tuple(tokens), sampling)
        scheduler.submit(Submission(request.request_id, request.prompt, 1, reads_prefix_cache=False))
        entries: list[TokenLogprobs] = []
        while scheduler.has_work:
            result, _ = self._round(scheduler, {request.request_id: request})
            entries += result.prompt_logprobs.get(request.request_id, ())
        assert len(entries) == len(tokens) - 1, (len(entries), len(tokens))
        return entries

    def _round(
        self, scheduler: Scheduler, requests: Mapping[RequestId, TokenRequest]
    ) -> tuple[RoundResult, Sequence[Outcome]]:
        start_s = time.perf_counter()
        plan = scheduler.plan()
        for start in plan.starts:
            self._runner.start(start, requests[start.request_id])
        result = self._runner.execute(plan)
        outcomes = scheduler.advance([StepDone(plan.round_id, result.tokens)])
        self.profile.rounds_s += time.perf_counter() - start_s
        self.profile.num_rounds += 1
        return result, outcomes

"""What a round takes, by the number of its rows and their context: `pdserve bench engine --scaling`.

Rounds are planned by hand over blocks full of numbers that no prompt was computed for: a row of context c computes the
token before position c over blocks that lie in random order, as after long service.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

from pdserve.bench.speed.in_process import CHUNK, kv_layout, load_runner
from pdserve.bench.speed.scaling_report import Scaling
from pdserve.config import Quantization
from pdserve.kv.layout import KVLayout
from pdserve.kv.storage import KVStorage
from pdserve.model.model_config import read_config
from pdserve.model.progress import Progress
from pdserve.model.runner import ModelRunner
from pdserve.request import BlockId, RequestId, SamplingParams, TokenRequest
from pdserve.scheduler.plan import RoundPlan, Row, SlotStart

REPEATS = 5


@dataclass(frozen=True, slots=True)
class Sizes:
    """Which rounds there are. starts: of a chunk, in its prompt. kv_bytes: the most that a round's requests hold."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    contexts: tuple[int, ...] = (128, 1024, 4096, 8192)
    starts: tuple[int, ...] = (0, 1024, 4096, 7680)
    chunk: int = CHUNK
    kv_bytes: int = 6 << 30

    def up_to(self, max_positions: int) -> Sizes:
        """Those that a model has positions for."""
        contexts = tuple(context for context in self.contexts if context <= max_positions)
        starts = tuple(start for start in self.starts if start + self.chunk <= max_positions)
        return Sizes(self.batches, contexts, starts, self.chunk, self.kv_bytes)

    def has_room(self, layout: KVLayout, batch: int, context: int) -> bool:
        return batch * layout.num_blocks_for(context) * layout.block_bytes <= self.kv_bytes

    def num_blocks(self, layout: KVLayout) -> int:
        """That the largest round holds."""
        rounds = [(batch, context) for batch in self.batches for context in self.contexts]
        decoding = [batch * layout.num_blocks_for(c) for batch, c in rounds if self.has_room(layout, batch, c)]
        return max(*decoding, *(layout.num_blocks_for(start + self.chunk) for start in self.starts))


SIZES = Sizes()


class Rounds:
    """Runs rounds over `storage`, all of which is written."""

    def __init__(self, runner: ModelRunner, storage: KVStorage, text: Sequence[int]) -> None:
        """text: what prompts are made of."""
        self._runner = runner
        self._layout = storage.layout
        self._text = tuple(text)
        self._blocks = [BlockId(block) for block in range(storage.num_blocks)]
        self._num_rounds = 0
        fill(storage)

    def decode_ms(self, batch: int, context: int) -> float:
        """A token for each of `batch` requests that have `context` tokens with it."""
        return self._median_ms([(context - 1, context)] * batch, is_chunk=False)

    def chunk_ms(self, start: int, chunk: int) -> float:
        """A chunk of one prompt, that is not its last."""
        return self._median_ms([(start, start + chunk)], is_chunk=True)

    def _median_ms(self, spans: Sequence[tuple[int, int]], *, is_chunk: bool) -> float:
        """Of a round with a row for each span of tokens, after one that warms up."""
        num_blocks = [self._layout.num_blocks_for(end) for _, end in spans]
        blocks = Random(self._num_rounds).sample(self._blocks, sum(num_blocks))
        rows = []
        for slot, ((start, end), count) in enumerate(zip(spans, num_blocks, strict=True)):
            own, blocks = blocks[:count], blocks[count:]
            request_id = RequestId(str(slot))
            self._runner.start(SlotStart(request_id, slot), self._request(request_id, end))
            rows.append(Row(request_id, slot, start, end, tuple(own), samples=not is_chunk))
        self._round_s(rows, is_chunk)
        rows = [row._replace(new_blocks=()) for row in rows]
        return 1e3 * statistics.median(self._round_s(rows, is_chunk) for _ in range(REPEATS))

    def _request(self, request_id: RequestId, num_tokens: int) -> TokenRequest:
        times = -(-num_tokens // len(self._text))
        prompt = (self._text * times)[:num_tokens]
        return TokenRequest(request_id, prompt, SamplingParams(max_new_tokens=1, temperature=0.0))

    def _round_s(self, rows: Sequence[Row], is_chunk: bool) -> float:
        self._num_rounds += 1
        prefill, decode = (tuple(rows), ()) if is_chunk else ((), tuple(rows))
        plan = RoundPlan(self._num_rounds, prefill=prefill, decode=decode)
        begun_s = time.perf_counter()
        self._runner.execute(plan)
        return time.perf_counter() - begun_s


def fill(storage: KVStorage) -> None:
    """Every block with the same normal numbers: a round's time is not up to what they are."""
    is_half = storage.layout.dtype == "bfloat16"
    slab = storage.slab.numpy().view(np.uint16 if is_half else np.uint32)
    numbers = np.random.default_rng(1).standard_normal((slab.shape[1],), np.float32).view(np.uint32)
    slab[:] = numbers >> 16 if is_half else numbers


def measure_scaling(
    directory: Path, quantization: Quantization, text: Sequence[int], num_threads: int, progress: Progress
) -> Scaling:
    config = read_config(directory)
    sizes, layout = SIZES.up_to(config.max_position_embeddings), kv_layout(config, quantization)
    storage = KVStorage(layout, sizes.num_blocks(layout))
    runner = load_runner(directory, storage, quantization, max(sizes.batches), num_threads)
    rounds = Rounds(runner, storage, text)
    chunk_ms = {start: rounds.chunk_ms(start, sizes.chunk) for start in sizes.starts}
    decode_ms: dict[int, dict[int, float | None]] = {}
    for number, batch in enumerate(sizes.batches):
        progress(f"{quantization} rounds", number, len(sizes.batches))
        decode_ms[batch] = {
            context: rounds.decode_ms(batch, context) if sizes.has_room(layout, batch, context) else None
            for context in sizes.contexts
        }
    progress(f"{quantization} rounds", len(sizes.batches), len(sizes.batches))
    return Scaling(quantization, decode_ms, chunk_ms)

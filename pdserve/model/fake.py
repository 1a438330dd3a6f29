"""A runner without a model: it makes tokens out of what it reads in a real slab, so wrong KV gives wrong tokens.

A token's *cell* is 32 bits that depend on the token and all before it, as a token's KV does. Cells are written into
the first and the last plane of the token's place in its block, and a drawn token is a hash of all cells of its context
as they are read back through the block table. A wrong block table, a block that was given away, KV that never arrived
or arrived in part: each changes what is drawn. `expected_tokens` says what must come out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pdserve.kv.storage import KVStorage
from pdserve.model.batch import Batch, Ints, SlotTable
from pdserve.model.noise import Words, mix
from pdserve.model.runner import RoundResult
from pdserve.request import RequestId, TokenLogprobs, TokenRequest
from pdserve.scheduler.plan import RoundPlan, SlotStart

Cells = NDArray[np.uint32]

CELL_BYTES = 4


class FakeRunner:
    """Implements ModelRunner over `storage`; sampling parameters other than logprobs change nothing.

    banned_tokens: never drawn, as the ids that end an answer in most tests.
    """

    def __init__(
        self,
        storage: KVStorage,
        vocab_size: int,
        max_slots: int,
        max_model_len: int,
        banned_tokens: Sequence[int] = (),
    ) -> None:
        self._vocabulary = allowed_tokens(vocab_size, banned_tokens)
        self._slot_table = SlotTable(max_slots, max_model_len, storage.layout.block_size)
        self._planes = (_cell_places(storage, 0, "k"), _cell_places(storage, storage.layout.num_layers - 1, "v"))
        # By slot: the request, where log probabilities were asked for.
        self._describes_output: dict[int, TokenRequest] = {}
        self._describes_prompt: dict[int, TokenRequest] = {}

    def start(self, start: SlotStart, request: TokenRequest) -> None:
        self._slot_table.start(start, request)
        self._describes_output.pop(start.slot, None)
        self._describes_prompt.pop(start.slot, None)
        if request.sampling.num_logprobs is not None:
            self._describes_output[start.slot] = request
        if request.sampling.prompt_logprobs is not None and not start.forced_output:
            self._describes_prompt[start.slot] = request

    def execute(self, plan: RoundPlan) -> RoundResult:
        batch = self._slot_table.build(plan)
        cells = self._write(batch)
        sums = self._read(batch)
        tokens = self._vocabulary[sums % np.uint64(len(self._vocabulary))]
        self._slot_table.append(batch, tokens)
        logprobs = self._describe_output(batch, tokens, sums) if self._describes_output else {}
        prompt_logprobs = self._describe_prompts(plan, batch, cells) if self._describes_prompt else {}
        return RoundResult(tokens.tolist(), logprobs, prompt_logprobs)

    def idle(self) -> None:
        """Nothing is shared with other ranks."""

    def _write(self, batch: Batch) -> Cells:
        """The cells of the batch's tokens, [num_tokens], written at their slots."""
        deltas = token_cells(batch.tokens, batch.positions)
        starts = batch.row_starts[:-1]
        before = batch.positions[starts] - 1  # the last position that an earlier round wrote
        has_before = before >= 0
        base = np.zeros(batch.num_rows, np.uint32)
        base[has_before] = self._cells(batch, batch.slots[has_before], before[has_before])
        running = np.cumsum(deltas, dtype=np.uint32)
        base -= running[starts] - deltas[starts]
        cells = running + np.repeat(base, np.diff(batch.row_starts))
        for plane in self._planes:
            plane[batch.slot_mapping] = cells
        return cells

    def _read(self, batch: Batch) -> Words:
        """A hash of every cell of each sampled row's context, [num_sampled]."""
        rows = batch.sampled_rows
        if not len(rows):
            return np.zeros(0, np.uint64)
        lengths = batch.context_lens[rows]
        starts = np.cumsum(lengths) - lengths
        positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)
        cells = self._cells(batch, np.repeat(batch.slots[rows], lengths), positions)
        return context_hash(np.add.reduceat(position_hashes(cells, positions), starts))

    def _cells(self, batch: Batch, slots: Ints, positions: Ints) -> Cells:
        """Read through the block tables, [n]; both planes must agree for a cell to be what was written."""
        size = self._slot_table.block_size
        places = batch.block_tables[slots, positions // size].astype(np.int64) * size + positions % size
        first, last = (plane[places] for plane in self._planes)
        return np.where(first == last, first, first ^ ~last)

    def _describe_output(self, batch: Batch, tokens: Ints, sums: Words) -> dict[int, TokenLogprobs]:
        return {
            sample: self._made_up(int(tokens[sample]), int(sums[sample]), request.sampling.num_logprobs)
            for sample, slot in enumerate(batch.slots[batch.sampled_rows].tolist())
            if (request := self._describes_output.get(slot)) is not None
        }

    def _describe_prompts(
        self, plan: RoundPlan, batch: Batch, cells: Cells
    ) -> dict[RequestId, tuple[TokenLogprobs, ...]]:
        described: dict[RequestId, tuple[TokenLogprobs, ...]] = {}
        for row, first in zip(plan.prefill, batch.row_starts.tolist(), strict=False):
            request = self._describes_prompt.get(row.slot)
            if request is not None:
                targets = request.prompt[row.start + 1 : row.end + 1]
                known = cells[first : first + len(targets)].tolist()
                num_top = request.sampling.prompt_logprobs
                described[row.request_id] = tuple(
                    self._made_up(token, cell, num_top) for token, cell in zip(targets, known, strict=True)
                )
        return described

    def _made_up(self, token: int, value: int, num_top: int | None) -> TokenLogprobs:
        """As deterministic as the tokens are; the alternatives are the vocabulary's first."""
        logprob = -(value % 1000 + 1) / 1000
        others = self._vocabulary[: num_top or 0].tolist()
        return TokenLogprobs(token, logprob, tuple((other, logprob - rank) for rank, other in enumerate(others)))


def expected_tokens(
    prompt: Sequence[int], num_tokens: int, vocab_size: int, banned_tokens: Sequence[int] = ()
) -> list[int]:
    """What a FakeRunner must generate after `prompt`, computed from the tokens alone."""
    vocabulary = allowed_tokens(vocab_size, banned_tokens)
    tokens = list(prompt)
    for _ in range(num_tokens):
        positions = np.arange(len(tokens))
        cells = np.cumsum(token_cells(np.array(tokens, np.int64), positions), dtype=np.uint32)
        drawn = context_hash(position_hashes(cells, positions).sum(keepdims=True))
        tokens.append(int(vocabulary[drawn % np.uint64(len(vocabulary))][0]))
    return tokens[len(prompt) :]


def allowed_tokens(vocab_size: int, banned_tokens: Sequence[int]) -> Ints:
    allowed: Ints = np.setdiff1d(np.arange(vocab_size), np.array(banned_tokens, np.int64))
    return allowed


def token_cells(tokens: Ints, positions: Ints) -> Cells:
    """What each token adds to the running sum that its cell is, [n]."""
    return mix(tokens.astype(np.uint64) << np.uint64(32) ^ positions.astype(np.uint64)).astype(np.uint32)


def position_hashes(cells: Cells, positions: Ints) -> Words:
    """Summed over a context, [n]: cells at other positions give another sum."""
    return mix(cells.astype(np.uint64) << np.uint64(32) ^ positions.astype(np.uint64))


def context_hash(sums: Words) -> Words:
    return mix(sums)


class _CellPlaces:
    """A plane's memory as cells by slot: one for each token, at the start of its first head's row."""

    def __init__(self, words: Cells, block_words: int, first_word: int, row_words: int, block_size: int) -> None:
        self._words = words
        self._block_words = block_words
        self._first_word = first_word
        self._row_words = row_words
        self._block_size = block_size

    def _index(self, slots: Ints) -> Ints:
        block, offset = slots // self._block_size, slots % self._block_size
        return block * self._block_words + self._first_word + offset * self._row_words

    def __getitem__(self, slots: Ints) -> Cells:
        return self._words[self._index(slots)]

    def __setitem__(self, slots: Ints, cells: Cells) -> None:
        self._words[self._index(slots)] = cells


def _cell_places(storage: KVStorage, layer: int, plane: str) -> _CellPlaces:
    layout = storage.layout
    row_bytes = layout.layer_bytes // (2 * layout.num_kv_heads * layout.block_size)
    if row_bytes % CELL_BYTES:
        raise ValueError(f"a token's row of a head is {row_bytes} bytes, the fake needs a multiple of {CELL_BYTES}")
    words: Cells = storage.slab.numpy().reshape(-1).view(np.uint32)
    first_word = layout.plane_offset(layer, plane) // CELL_BYTES
    return _CellPlaces(words, layout.block_bytes // CELL_BYTES, first_word, row_bytes // CELL_BYTES, layout.block_size)

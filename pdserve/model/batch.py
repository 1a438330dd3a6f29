"""From a plan to flat arrays: what each slot holds between rounds, and the batch of one round.

Everything is numpy and vectorised over rows, since a round of hundreds of decode rows pays for each loop.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pdserve.request import TokenRequest
from pdserve.scheduler.plan import RoundPlan, Row, SlotStart

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one round laid end to end, prefill rows first.

    Row r is tokens [row_starts[r], row_starts[r + 1]) of the flat arrays, and positions up to context_lens[r] of its
    request. Its blocks are block_tables[slots[r]].
    """

    tokens: Ints  # [num_tokens] token ids
    positions: Ints  # [num_tokens] in their requests
    slot_mapping: Ints  # [num_tokens] block_id * block_size + offset
    row_starts: Ints  # [num_rows + 1]
    context_lens: Ints  # [num_rows] the row's end: tokens visible to its last one
    slots: Ints  # [num_rows]
    sampled_rows: Ints  # [num_sampled] rows that draw a token
    block_tables: NDArray[np.int32]  # [max_slots, max_blocks], shared with the slot table: valid for this round

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def sampled_tokens(self) -> Ints:
        """[num_sampled] where in the flat arrays each sampled row's last token is."""
        return self.row_starts[self.sampled_rows + 1] - 1


class SlotTable:
    """What a runner remembers of each slot: its request's tokens and its blocks. Owned by the loop thread."""

    def __init__(self, max_slots: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        # Zeroed memory is given out by the system as it is touched: a slot costs what its longest request did.
        self.tokens: NDArray[np.int32] = np.zeros((max_slots, max_model_len + 1), np.int32)
        self.num_prompt_tokens: Ints = np.zeros(max_slots, np.int64)
        self.num_blocks: Ints = np.zeros(max_slots, np.int64)
        self.block_tables: NDArray[np.int32] = np.zeros((max_slots, -(-max_model_len // block_size)), np.int32)

    def start(self, start: SlotStart, request: TokenRequest) -> None:
        """Forget whoever had the slot and load this request's tokens; its blocks come with its first row."""
        known = request.prompt + start.forced_output
        assert len(known) < self.tokens.shape[1], f"{len(known)} tokens for a slot of {self.tokens.shape[1] - 1}"
        self.tokens[start.slot, : len(known)] = known
        self.num_prompt_tokens[start.slot] = len(request.prompt)
        self.num_blocks[start.slot] = 0

    def build(self, plan: RoundPlan) -> Batch:
        """The plan's rows as arrays. Adds their new blocks to the block tables. At least one row."""
        rows = plan.rows
        assert rows, f"round {plan.round_id} has no rows"
        _, slots, starts, ends, new_blocks, samples = (list(column) for column in zip(*rows, strict=True))
        self._add_blocks(rows, new_blocks)
        slots_, starts_, ends_ = np.array(slots, np.int64), np.array(starts, np.int64), np.array(ends, np.int64)
        lengths = ends_ - starts_
        row_starts = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=row_starts[1:])
        positions = np.arange(row_starts[-1]) + np.repeat(starts_ - row_starts[:-1], lengths)
        token_slots = np.repeat(slots_, lengths)
        blocks = self.block_tables[token_slots, positions // self.block_size].astype(np.int64)
        return Batch(
            tokens=self.tokens[token_slots, positions].astype(np.int64),
            positions=positions,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            row_starts=row_starts,
            context_lens=ends_,
            slots=slots_,
            sampled_rows=np.flatnonzero(np.array(samples, np.bool_)),
            block_tables=self.block_tables,
        )

    def _add_blocks(self, rows: tuple[Row, ...], new_blocks: list[tuple[int, ...]]) -> None:
        for row, blocks in zip(rows, new_blocks, strict=True):
            if blocks:
                first = self.num_blocks[row.slot]
                self.block_tables[row.slot, first : first + len(blocks)] = blocks
                self.num_blocks[row.slot] = first + len(blocks)

    def append(self, batch: Batch, tokens: Ints) -> None:
        """Write the drawn tokens, [num_sampled], each behind the last token of its row."""
        self.tokens[batch.slots[batch.sampled_rows], batch.context_lens[batch.sampled_rows]] = tokens

    def output_positions(self, batch: Batch) -> Ints:
        """[num_sampled] which token of its answer each sampled row is about to draw, from 0."""
        rows = batch.sampled_rows
        return batch.context_lens[rows] - self.num_prompt_tokens[batch.slots[rows]]

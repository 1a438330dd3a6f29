"""A fake model whose heads may be split over the processes of a rank: each writes and reads its own, all must agree."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from pdserve.kv.storage import KVStorage
from pdserve.model.batch import Batch, Ints
from pdserve.model.fake import Cells, FakeRunner
from pdserve.model.noise import Words, mix
from pdserve.request import TokenRequest
from pdserve.scheduler.plan import RoundPlan, SlotStart
from tests.roles.journal import LIMIT_S


class Exchange:
    """What the processes of a rank tell each other within a forward, which none of them ends before all are in it."""

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._sums: defaultdict[int, dict[int, Words]] = defaultdict(dict)  # by forward and part
        self._num_forwards = [0] * num_parts
        self._changed = threading.Condition()
        self._is_over = False

    def meet(self, part: int, sums: Words) -> Words:
        """The sums that all parts have; others where they differ, as a sum over the parts of a real model would be."""
        with self._changed:
            number = self._num_forwards[part] = self._num_forwards[part] + 1
            met = self._sums[number]
            met[part] = sums
            self._sums.pop(number - 2, None)  # who is here has left the last one, and all have left the one before
            self._changed.notify_all()
            is_met = self._changed.wait_for(lambda: self._is_over or len(met) == self._num_parts, LIMIT_S)
            assert is_met, f"forward {number}: of {self._num_parts} parts only {sorted(met)} came"
        for other in met.values():
            sums = np.where(sums == other, sums, mix(sums) ^ other)
        return sums

    def end(self) -> None:
        """Nobody waits any more: the rank is being stopped."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()


class HeadCells:
    """The cells of one head in one plane by slot. mask: makes them differ from those of every other head and plane."""

    def __init__(self, storage: KVStorage, layer: int, plane: str, place: int, mask: np.uint32) -> None:
        view = storage.view(layer, plane).numpy().view(np.uint32)
        self._words: Cells = view[:, place, :, 0]  # [num_blocks, block_size]
        self._mask = mask
        self._block_size = storage.layout.block_size

    def __getitem__(self, slots: Ints) -> Cells:
        return self._words[slots // self._block_size, slots % self._block_size] ^ self._mask

    def __setitem__(self, slots: Ints, cells: Cells) -> None:
        self._words[slots // self._block_size, slots % self._block_size] = cells ^ self._mask


class HeadsRunner(FakeRunner):
    """Cells are in every head of its storage. first_head: of the model's. part: the process of its rank."""

    def __init__(
        self,
        storage: KVStorage,
        vocab_size: int,
        max_slots: int,
        max_model_len: int,
        banned_tokens: Sequence[int] = (),
        *,
        first_head: int = 0,
        part: int = 0,
        exchange: Exchange | None = None,
    ) -> None:
        super().__init__(storage, vocab_size, max_slots, max_model_len, banned_tokens)
        self._part = part
        self._exchange = exchange or Exchange(1)
        last_layer = storage.layout.num_layers - 1
        self._heads = [
            HeadCells(storage, layer, plane, place, _mask(layer, plane, first_head + place))
            for layer, plane in ((0, "k"), (last_layer, "v"))
            for place in range(storage.layout.num_kv_heads)
        ]

    def _write(self, batch: Batch) -> Cells:
        cells = super()._write(batch)
        for head in self._heads:
            head[batch.slot_mapping] = cells
        return cells

    def _read(self, batch: Batch) -> Words:
        return self._exchange.meet(self._part, super()._read(batch))

    def _cells(self, batch: Batch, slots: Ints, positions: Ints) -> Cells:
        """As read from all heads, which must agree."""
        size = self._slot_table.block_size
        places = batch.block_tables[slots, positions // size].astype(np.int64) * size + positions % size
        cells, *others = (head[places] for head in self._heads)
        for other in others:
            cells = np.where(cells == other, cells, cells ^ ~other)
        return cells


class HeadsFollower:
    """Implements Follower: the part of a rank's process that does not lead."""

    def __init__(self, runner: HeadsRunner) -> None:
        self._runner = runner
        self._batch: Batch | None = None

    def start(self, start: SlotStart, request: TokenRequest) -> None:
        self._runner.start(start, request)

    def compute(self, plan: RoundPlan) -> None:
        self._batch = self._runner._slot_table.build(plan)
        self._runner._write(self._batch)
        self._runner._read(self._batch)

    def append(self, tokens: Sequence[int]) -> None:
        assert self._batch is not None, f"{tokens} before any round"
        self._runner._slot_table.append(self._batch, np.array(tokens, np.int64))

    def idle(self) -> None:
        """Nothing is shared with other ranks."""


def _mask(layer: int, plane: str, head: int) -> np.uint32:
    word = np.uint64(layer << 16 | (plane == "v") << 8 | head)
    return np.uint32(mix(np.array([word]))[0] & np.uint64(0xFFFFFFFF))

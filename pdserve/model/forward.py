"""One round's forward, as every rank that holds a part of the model has to run it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

from pdserve.config import Quantization
from pdserve.kv.storage import KVStorage
from pdserve.model.attention import Attention, build_attention
from pdserve.model.batch import Batch, Ints, SlotTable
from pdserve.model.collectives import Alone, Collectives
from pdserve.model.layer_ops import build_ops
from pdserve.model.llama import Llama
from pdserve.model.matrices import Matrices
from pdserve.model.model_config import ModelConfig
from pdserve.model.native_layers import build_layers
from pdserve.model.progress import Progress, no_progress
from pdserve.model.slices import slices_of
from pdserve.model.weights import load_weights
from pdserve.request import RequestId, TokenRequest
from pdserve.scheduler.plan import RoundPlan, Row, SlotStart

# Prompt rows whose logits are held at a time: a vocabulary of 150k times 64 is 38 MB.
PROMPT_LOGPROB_ROWS = 64


@dataclass(frozen=True, slots=True)
class Computed:
    """A plan's forward. It is valid until the next one."""

    batch: Batch
    hidden: Tensor  # [num_tokens, hidden], normed
    logits: Tensor  # [num_sampled, vocab]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """Some consecutive rows of a prompt whose log probabilities were asked for."""

    request_id: RequestId
    logits: Tensor  # [rows, vocab]
    targets: Ints  # [rows] the token that follows each
    num_top: Ints  # [rows] how many of the best were asked for


class RoundForward:
    """Owned by the loop thread. The ranks of one model make the same calls in the same order: they exchange within."""

    def __init__(self, model: Llama, attention: Attention, slot_table: SlotTable) -> None:
        self._model = model
        self._attention = attention
        self._slot_table = slot_table
        # Slots whose requests want log probabilities of their prompt, and how many of the best.
        self._prompt_logprobs: dict[int, int] = {}

    def start(self, start: SlotStart, request: TokenRequest) -> None:
        self._slot_table.start(start, request)
        self._prompt_logprobs.pop(start.slot, None)
        # A request with output already has had its prompt's log probabilities with its first token.
        if request.sampling.prompt_logprobs is not None and not start.forced_output:
            self._prompt_logprobs[start.slot] = request.sampling.prompt_logprobs

    def compute(self, plan: RoundPlan) -> Computed:
        """At least one row."""
        batch = self._slot_table.build(plan)
        self._attention.plan(batch)
        hidden = self._model.forward(torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions))
        return Computed(batch, hidden, self._model.logits(hidden[torch.from_numpy(batch.sampled_tokens)]))

    def idle(self) -> None:
        """A round of the group in which this rank has no rows."""
        self._model.idle_forward()

    def output_positions(self, computed: Computed) -> Ints:
        """[num_sampled] which token of its answer each sampled row is about to draw, from 0."""
        return self._slot_table.output_positions(computed.batch)

    def append(self, computed: Computed, tokens: Ints) -> None:
        """What was drawn, [num_sampled], is the input of the next round."""
        self._slot_table.append(computed.batch, tokens)

    def prompt_parts(self, plan: RoundPlan, computed: Computed) -> Iterator[PromptPart]:
        """Of the prefill rows that asked, in order. To be taken to its end."""
        if not self._prompt_logprobs:
            return
        first_tokens = computed.batch.row_starts[: len(plan.prefill)].tolist()
        for row, first in zip(plan.prefill, first_tokens, strict=True):
            if row.slot in self._prompt_logprobs:
                yield from self._prompt_parts(row, computed.hidden[first : first + row.num_tokens])

    def _prompt_parts(self, row: Row, hidden: Tensor) -> Iterator[PromptPart]:
        """The tokens that follow the row's, as far as the prompt goes. hidden [row_tokens, hidden]."""
        end = min(row.end + 1, int(self._slot_table.num_prompt_tokens[row.slot]))
        targets = self._slot_table.tokens[row.slot, row.start + 1 : end].astype(np.int64)
        for first in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            part = targets[first : first + PROMPT_LOGPROB_ROWS]
            logits = self._model.logits(hidden[first : first + len(part)])
            yield PromptPart(row.request_id, logits, part, np.full(len(part), self._prompt_logprobs[row.slot]))


class LoadArgs(TypedDict):
    """What load_forward takes beside the model and its memory; see there."""

    max_slots: int
    max_model_len: int
    cache_dir: Path
    num_threads: NotRequired[int | None]
    progress: NotRequired[Progress]
    collectives: NotRequired[Collectives | None]
    quantization: NotRequired[Quantization]


def load_forward(
    directory: Path,
    config: ModelConfig,
    storage: KVStorage,
    *,
    max_slots: int,
    max_model_len: int,
    cache_dir: Path,
    num_threads: int | None = None,
    progress: Progress = no_progress,
    collectives: Collectives | None = None,
    quantization: Quantization = "fp32",
) -> RoundForward:
    """A rank's part of the model in `directory`, over `storage`: its layout is `config.kv_layout(...).shard(tp_size)`.

    cache_dir: where built kernels are kept. num_threads: torch's and the kernel's threads; None leaves
    torch's own choice. Raises StartupError, naming what is wrong with the weights, or the sizes that tensor parallelism
    can have.
    """
    collectives = collectives or Alone()
    slices = slices_of(config, collectives.shard)
    assert storage.layout.num_kv_heads == len(slices.kv_heads), f"{storage.layout} for KV heads {slices.kv_heads}"
    ops = build_ops(cache_dir)
    matrices = Matrices(quantization, cache_dir, ops)
    weights = load_weights(directory, config, progress, collectives.shard, matrices)
    attention = build_attention(storage, len(slices.heads), cache_dir)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    slot_table = SlotTable(max_slots, max_model_len, storage.layout.block_size)
    native = build_layers(config, weights, attention, ops, collectives.shard, cache_dir)
    return RoundForward(Llama(config, weights, attention, collectives, ops, native), attention, slot_table)

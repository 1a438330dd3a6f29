"""The ModelRunner of real models: one process, one slab, torch on the CPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pdserve.kv.storage import KVStorage
from pdserve.model.attention import Attention, build_attention
from pdserve.model.batch import Batch, SlotTable
from pdserve.model.llama import Llama
from pdserve.model.logprobs import describe, log_probabilities
from pdserve.model.model_config import ModelConfig
from pdserve.model.progress import Progress, no_progress
from pdserve.model.runner import RoundResult
from pdserve.model.sampler import Sampler
from pdserve.model.weights import ModelWeights, load_weights
from pdserve.request import RequestId, TokenLogprobs, TokenRequest
from pdserve.scheduler.plan import RoundPlan, Row, SlotStart

# Prompt rows whose logits are held at a time: a vocabulary of 150k times 64 is 38 MB.
PROMPT_LOGPROB_ROWS = 64


class TorchRunner:
    """Implements ModelRunner. Owned by the loop thread.

    num_threads: torch's and the kernel's threads; None leaves torch's own choice.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        storage: KVStorage,
        attention: Attention,
        max_slots: int,
        max_model_len: int,
        num_threads: int | None = None,
    ) -> None:
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        self._attention = attention
        self._model = Llama(config, weights, attention)
        self._slot_table = SlotTable(max_slots, max_model_len, storage.layout.block_size)
        self._sampler = Sampler(config.vocab_size, max_slots, config.eos_token_ids)
        # Slots whose requests want log probabilities of their prompt, and how many of the best.
        self._prompt_logprobs: dict[int, int] = {}

    def start(self, start: SlotStart, request: TokenRequest) -> None:
        self._slot_table.start(start, request)
        self._sampler.start(start, request)
        self._prompt_logprobs.pop(start.slot, None)
        # A request with output already has had its prompt's log probabilities with its first token.
        if request.sampling.prompt_logprobs is not None and not start.forced_output:
            self._prompt_logprobs[start.slot] = request.sampling.prompt_logprobs

    @torch.inference_mode()
    def execute(self, plan: RoundPlan) -> RoundResult:
        batch = self._slot_table.build(plan)
        self._attention.plan(batch)
        hidden = self._model.forward(torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions))
        logits = self._model.logits(hidden[torch.from_numpy(batch.sampled_tokens)])
        positions = self._slot_table.output_positions(batch)
        drawn = self._sampler.draw(logits, batch.slots[batch.sampled_rows], positions)
        self._slot_table.append(batch, drawn.tokens)
        return RoundResult(drawn.tokens.tolist(), drawn.logprobs, self._describe_prompts(plan, batch, hidden))

    def _describe_prompts(
        self, plan: RoundPlan, batch: Batch, hidden: Tensor
    ) -> dict[RequestId, tuple[TokenLogprobs, ...]]:
        if not self._prompt_logprobs:
            return {}
        first_tokens = batch.row_starts[: len(plan.prefill)].tolist()
        return {
            row.request_id: tuple(self._describe_prompt(row, hidden[first : first + row.num_tokens]))
            for row, first in zip(plan.prefill, first_tokens, strict=True)
            if row.slot in self._prompt_logprobs
        }

    def _describe_prompt(self, row: Row, hidden: Tensor) -> list[TokenLogprobs]:
        """The tokens that follow the row's, as far as the prompt goes. hidden [row_tokens, hidden]."""
        end = min(row.end + 1, int(self._slot_table.num_prompt_tokens[row.slot]))
        targets = self._slot_table.tokens[row.slot, row.start + 1 : end].astype(np.int64)
        num_top = np.full(len(targets), self._prompt_logprobs[row.slot])
        entries: list[TokenLogprobs] = []
        for first in range(0, len(targets), PROMPT_LOGPROB_ROWS):
            part = slice(first, min(first + PROMPT_LOGPROB_ROWS, len(targets)))
            entries += describe(log_probabilities(self._model.logits(hidden[part])), targets[part], num_top[part])
        return entries


def load(
    directory: Path,
    config: ModelConfig,
    storage: KVStorage,
    *,
    max_slots: int,
    max_model_len: int,
    cache_dir: Path,
    num_threads: int | None = None,
    progress: Progress = no_progress,
) -> TorchRunner:
    """The runner of a model directory over `storage`, whose layout is `config.kv_layout(...)`.

    cache_dir: where the built attention kernel is kept. Raises StartupError, naming what is wrong with the weights.
    """
    weights = load_weights(directory, config, progress)
    attention = build_attention(storage, config.num_heads, cache_dir)
    return TorchRunner(config, weights, storage, attention, max_slots, max_model_len, num_threads)

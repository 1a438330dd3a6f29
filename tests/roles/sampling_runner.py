"""A fake model under the real sampler: what is read from the slab becomes logits, and every parameter counts."""

from __future__ import annotations

import numpy as np
import torch

from pdserve.kv.storage import KVStorage
from pdserve.model.noise import Words, mix
from pdserve.model.runner import RoundResult
from pdserve.model.sampler import Sampler
from pdserve.request import TokenRequest
from pdserve.scheduler.plan import RoundPlan, SlotStart
from tests.roles.heads import HeadsRunner

# Wide enough that no two tokens are as good, narrow enough that a temperature below 1 leaves a choice.
SPREAD = 6.0


class SamplingRunner(HeadsRunner):
    """Its logits are exact: the same context has the same ones on every node, in whatever chunks it came."""

    def __init__(self, storage: KVStorage, vocab_size: int, max_slots: int, max_model_len: int, eos: int) -> None:
        super().__init__(storage, vocab_size, max_slots, max_model_len)
        self._sampler = Sampler(vocab_size, max_slots, (eos,))

    def start(self, start: SlotStart, request: TokenRequest) -> None:
        super().start(start, request)
        self._sampler.start(start, request)

    def execute(self, plan: RoundPlan) -> RoundResult:
        batch = self._slot_table.build(plan)
        cells = self._write(batch)
        logits = made_up_logits(self._read(batch), len(self._vocabulary))
        positions = self._slot_table.output_positions(batch)
        drawn = self._sampler.draw(logits, batch.slots[batch.sampled_rows], positions)
        self._slot_table.append(batch, drawn.tokens)
        prompt_logprobs = self._describe_prompts(plan, batch, cells) if self._describes_prompt else {}
        return RoundResult(drawn.tokens.tolist(), drawn.logprobs, prompt_logprobs)


def made_up_logits(sums: Words, vocab_size: int) -> torch.Tensor:
    """[rows, vocab] float32 out of a hash a row."""
    words = mix(sums[:, None] ^ mix(np.arange(vocab_size, dtype=np.uint64))[None, :])
    return torch.from_numpy((words >> np.uint64(40)).astype(np.float32) * np.float32(SPREAD * 2.0**-24))

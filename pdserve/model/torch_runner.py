"""The ModelRunner and the Follower of real models: one process, one slab, torch on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

import numpy as np
import torch

from pdserve.kv.storage import KVStorage
from pdserve.model.forward import Computed, LoadArgs, RoundForward, load_forward
from pdserve.model.logprobs import describe, log_probabilities
from pdserve.model.model_config import ModelConfig
from pdserve.model.runner import RoundResult
from pdserve.model.sampler import Sampler
from pdserve.request import RequestId, TokenLogprobs, TokenRequest
from pdserve.scheduler.plan import RoundPlan, SlotStart


class TorchRunner:
    """Implements ModelRunner: of the whole model, or of the rank that leads those that hold its parts."""

    def __init__(self, forward: RoundForward, sampler: Sampler) -> None:
        self._forward = forward
        self._sampler = sampler

    def start(self, start: SlotStart, request: TokenRequest) -> None:
        self._forward.start(start, request)
        self._sampler.start(start, request)

    @torch.inference_mode()
    def execute(self, plan: RoundPlan) -> RoundResult:
        computed = self._forward.compute(plan)
        batch, positions = computed.batch, self._forward.output_positions(computed)
        drawn = self._sampler.draw(computed.logits, batch.slots[batch.sampled_rows], positions)
        self._forward.append(computed, drawn.tokens)
        return RoundResult(drawn.tokens.tolist(), drawn.logprobs, self._describe_prompts(plan, computed))

    @torch.inference_mode()
    def idle(self) -> None:
        self._forward.idle()

    def _describe_prompts(self, plan: RoundPlan, computed: Computed) -> dict[RequestId, tuple[TokenLogprobs, ...]]:
        described: dict[RequestId, list[TokenLogprobs]] = {}
        for part in self._forward.prompt_parts(plan, computed):
            entries = describe(log_probabilities(part.logits), part.targets, part.num_top)
            described.setdefault(part.request_id, []).extend(entries)
        return {request_id: tuple(entries) for request_id, entries in described.items()}


class TorchFollower:
    """Implements Follower."""

    def __init__(self, forward: RoundForward) -> None:
        self._forward = forward
        self._computed: Computed | None = None

    def start(self, start: SlotStart, request: TokenRequest) -> None:
        self._forward.start(start, request)

    @torch.inference_mode()
    def compute(self, plan: RoundPlan) -> None:
        self._computed = self._forward.compute(plan)
        for _ in self._forward.prompt_parts(plan, self._computed):
            pass

    def append(self, tokens: Sequence[int]) -> None:
        assert self._computed is not None, f"tokens {tokens} without a plan"
        self._forward.append(self._computed, np.array(tokens, np.int64))
        self._computed = None

    @torch.inference_mode()
    def idle(self) -> None:
        self._forward.idle()


def load(directory: Path, config: ModelConfig, storage: KVStorage, **loading: Unpack[LoadArgs]) -> TorchRunner:
    """The runner that draws the tokens; the other ranks' are `TorchFollower(load_forward(...))`. See load_forward."""
    forward = load_forward(directory, config, storage, **loading)
    return TorchRunner(forward, Sampler(config.vocab_size, loading["max_slots"], config.eos_token_ids))

"""Log probabilities as callers see them, from the model's own logits."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pdserve.model.batch import Ints
from pdserve.request import TokenLogprobs


def log_probabilities(logits: Tensor) -> Tensor:
    """[rows, vocab] float32, a copy."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def describe(logprobs: Tensor, tokens: Ints, num_top: Ints) -> list[TokenLogprobs]:
    """One entry a row: its token's log probability and its num_top best. logprobs [rows, vocab]; the rest [rows]."""
    chosen = logprobs.numpy()[np.arange(len(tokens)), tokens].tolist()
    widest = min(int(num_top.max(initial=0)), logprobs.shape[1])
    best = logprobs.topk(widest, dim=-1)
    ids, values = best.indices.tolist(), best.values.tolist()
    return [
        TokenLogprobs(int(token), chosen[row], tuple(zip(ids[row][:count], values[row][:count], strict=True)))
        for row, (token, count) in enumerate(zip(tokens, num_top, strict=True))
    ]

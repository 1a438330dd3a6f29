"""A mixture of experts: a router sends each token to a few MLPs, wherever in the group they lie.

    x ─▶ router ─▶ top-k of each row ─▶ rows sorted by expert ═▶ the experts' ranks ─▶ one MLP an expert
                                                                                               │
      weighted sum in the order of the top-k ◀─ rows in the order they were sent in ◀═ back ◀──┘

═▶ is an exchange between expert-parallel ranks; without them the rows stay where they are. An expert's answer to a row
does not depend on which rows it is asked with, nor a sum on who computed its parts: an answer is the same bits over any
number of expert-parallel ranks (where `Linear` packs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from pdserve.model.checkpoint import Checkpoint
from pdserve.model.collectives import Collectives
from pdserve.model.experts_config import ExpertsConfig
from pdserve.model.layer_ops import TORCH_OPS, LayerOps
from pdserve.model.linear import Linear
from pdserve.model.matrices import Matrices, Matrix
from pdserve.model.mlp import gated
from pdserve.model.shard import Shard, part


@dataclass(frozen=True, slots=True)
class Expert:
    """A gated MLP, or a tensor-parallel rank's slice of it."""

    gate_up: Matrix  # hidden -> 2 * intermediate
    down: Matrix  # intermediate -> hidden


@dataclass(frozen=True, slots=True)
class Experts:
    """Implements Mlp. local: the experts of this rank, as Shard.experts_of says."""

    router: Linear  # hidden -> num_experts
    local: Sequence[Expert]
    num_experts_per_token: int
    renormalises: bool
    ops: LayerOps = TORCH_OPS

    @property
    def is_shared(self) -> bool:
        return True

    def __call__(self, x: Tensor, collectives: Collectives) -> Tensor:
        probabilities = self.router(x).softmax(-1)
        weights, chosen = probabilities.topk(self.num_experts_per_token, dim=-1)
        if self.renormalises:
            weights = weights / weights.sum(-1, keepdim=True)
        chosen = chosen.flatten()
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=probabilities.shape[1])
        sorted_answers = self._ask(x[order // self.num_experts_per_token], counts, collectives)
        answers = torch.empty_like(sorted_answers)
        answers[order] = sorted_answers
        return collectives.add_up(_weighted_sum(answers.view(*weights.shape, x.shape[1]), weights))

    def _ask(self, rows: Tensor, counts: Tensor, collectives: Collectives) -> Tensor:
        """rows sorted by expert, counts [num_experts] -> the experts' answers, in the rows' order."""
        num_ranks = collectives.shard.ep_size
        if num_ranks == 1:
            return self._compute(rows, counts)
        sizes = [len(part(len(counts), num_ranks, rank)) for rank in range(num_ranks)]
        sent = pad_sequence(list(counts.split_with_sizes(sizes)), batch_first=True)  # [ranks, most experts of a rank]
        came = collectives.exchange_counts(sent)[:, : len(self.local)]
        num_sent, num_received = sent.sum(1).tolist(), came.sum(1).tolist()
        answers = self._answer(collectives.exchange(rows, num_sent, num_received), came)
        return collectives.exchange(answers, num_received, num_sent)

    def _answer(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows as they came: sorted by rank, then by expert; counts [ranks, local experts]."""
        experts = torch.arange(len(self.local), device=counts.device).expand_as(counts)
        order = experts.flatten().repeat_interleave(counts.flatten()).argsort(stable=True)
        answers = torch.empty_like(rows)
        answers[order] = self._compute(rows[order], counts.sum(0))
        return answers

    def _compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows sorted by local expert, counts [local experts]."""
        parts = zip(self.local, rows.split_with_sizes(counts.tolist()), strict=True)
        answers = [gated(own, expert.gate_up, expert.down, self.ops) for expert, own in parts if len(own)]
        return torch.cat(answers) if answers else rows


def _weighted_sum(answers: Tensor, weights: Tensor) -> Tensor:
    """answers [rows, k, hidden], overwritten; weights [rows, k]. One after the other: a reduction's order may vary."""
    total, *others = answers.mul_(weights[..., None]).unbind(1)
    for answer in others:
        total = total + answer
    return total


def load_experts(
    checkpoint: Checkpoint, config: ExpertsConfig, prefix: str, shard: Shard, matrices: Matrices
) -> Experts:
    """The rank's experts of a layer; the others' are not read. prefix: of the layer's tensors, with its dot at the end.

    Raises StartupError where tensor parallelism cannot slice them, or a rank would have none.
    """
    held = shard.experts_of(config.num_experts)
    neurons = shard.slice_of("neurons of an expert", config.intermediate_size)
    for expert in range(config.num_experts):
        if expert not in held:
            checkpoint.leave([prefix + name for name in config.names.matrices(expert)])
    router = Linear(checkpoint.take(prefix + config.names.router))
    local = tuple(_load_expert(checkpoint, config, prefix, expert, neurons, matrices) for expert in held)
    return Experts(router, local, config.num_experts_per_token, config.renormalises, matrices.ops)


def _load_expert(
    checkpoint: Checkpoint, config: ExpertsConfig, prefix: str, expert: int, neurons: range, matrices: Matrices
) -> Expert:
    gate, up, down = (prefix + name for name in config.names.matrices(expert))
    gate_up = torch.cat([checkpoint.take(name, rows=neurons) for name in (gate, up)])
    return Expert(matrices.of_layer(gate_up), matrices.of_layer(checkpoint.take(down, columns=neurons)))

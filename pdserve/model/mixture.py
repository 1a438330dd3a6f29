"""What an upcycled model is like. Without torch: a node's front names it too."""

from __future__ import annotations

from dataclasses import dataclass

# One line of history a bump, so that cached models are made again:
# 1  float32, one file an expert, routers with a variance of 1 / hidden_size.
UPCYCLER_VERSION = 1


@dataclass(frozen=True, slots=True)
class Mixture:
    """noise_scale: of the experts' noise, in standard deviations of each matrix; with none all are equal."""

    num_experts: int = 4
    num_experts_per_token: int = 2
    noise_scale: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        assert 0 < self.num_experts_per_token <= self.num_experts, self

"""What a config.json says of a mixture of experts, and how its family publishes their tensors."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.model.config_fields import Fields


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Of a layer's tensors. block: what they all begin with; gate, up, down: an expert's three matrices."""

    block: str
    gate: str
    up: str
    down: str

    @property
    def router(self) -> str:
        return f"{self.block}.gate.weight"

    def matrices(self, expert: int) -> tuple[str, str, str]:
        """An expert's gate, up and down."""
        prefix = f"{self.block}.experts.{expert}"
        return f"{prefix}.{self.gate}.weight", f"{prefix}.{self.up}.weight", f"{prefix}.{self.down}.weight"


MIXTRAL = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")
QWEN3 = ExpertNames("mlp", gate="gate_proj", up="up_proj", down="down_proj")


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """renormalises: the weights of a token's experts sum to one. layers: those with experts; the others are dense."""

    names: ExpertNames
    num_experts: int
    num_experts_per_token: int
    intermediate_size: int
    renormalises: bool
    layers: frozenset[int]

    def shapes(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """A layer's tensors by published name."""
        inwards, outwards = (self.intermediate_size, hidden_size), (hidden_size, self.intermediate_size)
        shapes: dict[str, tuple[int, ...]] = {self.names.router: (self.num_experts, hidden_size)}
        for expert in range(self.num_experts):
            shapes |= dict(zip(self.names.matrices(expert), (inwards, inwards, outwards), strict=True))
        return shapes


def read_mixtral(fields: Fields, num_layers: int) -> ExpertsConfig:
    """Raises StartupError, naming the field, its value and the remedy, as the other does."""
    num_experts = fields.integer("num_local_experts")
    return ExpertsConfig(
        names=MIXTRAL,
        num_experts=num_experts,
        num_experts_per_token=_num_per_token(fields, num_experts),
        intermediate_size=fields.integer("intermediate_size"),
        renormalises=True,
        layers=frozenset(range(num_layers)),
    )


def read_qwen3(fields: Fields, num_layers: int) -> ExpertsConfig:
    # Published ones say num_experts; transformers 5 writes num_local_experts.
    published, later = "num_experts", "num_local_experts"
    is_later = fields.raw.get(published) is None and fields.raw.get(later) is not None
    num_experts = fields.integer(later if is_later else published)
    step, dense = fields.integer("decoder_sparse_step", 1), fields.indices("mlp_only_layers")
    return ExpertsConfig(
        names=QWEN3,
        num_experts=num_experts,
        num_experts_per_token=_num_per_token(fields, num_experts),
        intermediate_size=fields.integer("moe_intermediate_size"),
        renormalises=fields.boolean("norm_topk_prob", False),
        layers=frozenset(index for index in range(num_layers) if (index + 1) % step == 0) - dense,
    )


def _num_per_token(fields: Fields, num_experts: int) -> int:
    count = fields.integer("num_experts_per_tok")
    if count > num_experts:
        fields.refuse("num_experts_per_tok", f"there are {num_experts} experts; the config is damaged")
    return count

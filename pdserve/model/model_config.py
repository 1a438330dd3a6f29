"""What a model directory's config.json says, checked: a frozen config, or one line why it cannot be served."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pdserve.errors import StartupError
from pdserve.kv.layout import KVLayout
from pdserve.model.config_fields import Fields, read_json
from pdserve.model.experts_config import ExpertsConfig, read_mixtral, read_qwen3


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture differs from Llama. read_experts: from the config's fields and the number of layers."""

    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    read_experts: Callable[[Fields, int], ExpertsConfig] | None = None


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(has_qkv_bias=True),
    "Qwen3ForCausalLM": Family(has_qk_norm=True),
    "MixtralForCausalLM": Family(read_experts=read_mixtral),
    "Qwen3MoeForCausalLM": Family(has_qk_norm=True, read_experts=read_qwen3),
}


@dataclass(frozen=True, slots=True)
class DefaultRope:
    """Rotary embedding as first published (RoFormer)."""

    theta: float


@dataclass(frozen=True, slots=True)
class LinearRope:
    """Positions divided by `factor`."""

    theta: float
    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Rope:
    """Low frequencies divided by `factor`, high ones kept, a ramp between (Llama 3.1)."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnRope:
    """YaRN (Peng et al. 2023). attention_factor scales cos and sin; truncate rounds the ramp's ends outwards."""

    theta: float
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None
    mscale: float | None
    mscale_all_dim: float | None
    beta_fast: float
    beta_slow: float
    truncate: bool


Rope = DefaultRope | LinearRope | Llama3Rope | YarnRope


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family. eos_token_ids: any of them ends an answer. intermediate_size: of dense layers."""

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: Rope
    has_tied_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    experts: ExpertsConfig | None = None

    @property
    def family(self) -> Family:
        return FAMILIES[self.architecture]

    @property
    def intermediate_sizes(self) -> frozenset[int]:
        """Of every MLP there is: a dense layer's, an expert's."""
        if self.experts is None:
            return frozenset({self.intermediate_size})
        dense = {self.intermediate_size} if self.has_dense_layers else set()
        return frozenset(dense | {self.experts.intermediate_size})

    @property
    def has_dense_layers(self) -> bool:
        return self.experts is None or len(self.experts.layers) < self.num_layers

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """None where the layer is dense."""
        return self.experts if self.experts is not None and layer in self.experts.layers else None

    def kv_layout(self, block_size: int, dtype: str = "float32") -> KVLayout:
        return KVLayout(self.num_layers, self.num_kv_heads, self.head_dim, block_size, dtype)


def read_config(directory: Path) -> ModelConfig:
    """The config of a model directory. Raises StartupError, naming the field, its value and the remedy."""
    path = directory / "config.json"
    raw = read_json(path)
    if raw is None:
        raise StartupError(f"{path} does not exist; give a directory with config.json and *.safetensors")
    fields = Fields(raw, path)
    _refuse_unsupported(fields)
    generation = read_json(directory / "generation_config.json") or {}
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers, architecture = fields.integer("num_hidden_layers"), _architecture(fields)
    read_experts = FAMILIES[architecture].read_experts
    config = ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=fields.integer("head_dim", hidden_size // num_heads),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields),
        has_tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=_eos_token_ids(generation.get("eos_token_id"), raw.get("eos_token_id")),
        experts=read_experts(fields, num_layers) if read_experts is not None else None,
    )
    if config.num_heads % config.num_kv_heads:
        fields.refuse("num_key_value_heads", f"must divide num_attention_heads ({num_heads}); the config is damaged")
    if config.head_dim % 2:
        fields.refuse("head_dim", "must be even for rotary embeddings; the config is damaged")
    return config


def _architecture(fields: Fields) -> str:
    names = fields.raw.get("architectures") or []
    if len(names) != 1 or names[0] not in FAMILIES:
        fields.refuse("architectures", f"serve one of {', '.join(FAMILIES)}")
    return str(names[0])


def _refuse_unsupported(fields: Fields) -> None:
    raw = fields.raw
    _architecture(fields)
    if raw.get("quantization_config") is not None:
        method = (raw["quantization_config"] or {}).get("quant_method", "unknown")
        raise StartupError(
            f"{fields.path}: quantization_config.quant_method is {method!r}; "
            "quantized checkpoints are not served yet, use the unquantized one"
        )
    if raw.get("hidden_act", "silu") != "silu":
        fields.refuse("hidden_act", "only silu is served; use another model")
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name):
            fields.refuse(name, "biases are served for Qwen2's q, k and v only; use another model")
    if (raw.get("partial_rotary_factor") or 1.0) != 1.0:
        fields.refuse("partial_rotary_factor", "only full rotary embeddings are served; use another model")
    _refuse_sliding_window(fields)


def _refuse_sliding_window(fields: Fields) -> None:
    raw, remedy = fields.raw, "sliding windows are not served yet; use a model with full attention"
    if "sliding_attention" in (raw.get("layer_types") or ()):
        fields.refuse("layer_types", remedy)
    # Qwen configs carry a window that `use_sliding_window` switches off.
    window = raw.get("sliding_window") if raw.get("use_sliding_window", True) else None
    if window is not None and window < raw.get("max_position_embeddings", 0):
        fields.refuse("sliding_window", remedy)


def _rope(fields: Fields) -> Rope:
    """`rope_theta` with `rope_scaling`, or the newer `rope_parameters` that holds both."""
    raw = fields.raw
    name = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    scaling = raw.get(name) or {}
    inner = Fields({"rope_theta": raw.get("rope_theta"), **scaling}, fields.path, f"{name}.")
    theta = inner.number("rope_theta", 10_000.0)
    kind_field = "rope_type" if "rope_type" in scaling else "type"
    match scaling.get(kind_field, "default"):
        case "default":
            return DefaultRope(theta)
        case "linear":
            return LinearRope(theta, inner.number("factor"))
        case "llama3":
            return Llama3Rope(
                theta,
                inner.number("factor"),
                inner.number("low_freq_factor"),
                inner.number("high_freq_factor"),
                inner.integer("original_max_position_embeddings"),
            )
        case "yarn":
            return _yarn(inner, theta, fields.integer("max_position_embeddings"))
        case _:
            inner.refuse(kind_field, "served are default, linear, llama3 and yarn; use another model")
            raise AssertionError("refuse raises")


def _yarn(inner: Fields, theta: float, max_position_embeddings: int) -> YarnRope:
    original = inner.integer("original_max_position_embeddings", max_position_embeddings)
    return YarnRope(
        theta=theta,
        factor=inner.number("factor", max_position_embeddings / original),
        original_max_position_embeddings=original,
        attention_factor=inner.optional("attention_factor"),
        mscale=inner.optional("mscale"),
        mscale_all_dim=inner.optional("mscale_all_dim"),
        beta_fast=inner.number("beta_fast", 32.0),
        beta_slow=inner.number("beta_slow", 1.0),
        truncate=bool(inner.raw.get("truncate", True)),
    )


def _eos_token_ids(*sources: int | list[int] | None) -> tuple[int, ...]:
    """Every id that either file names, once, in order."""
    ids: list[int] = []
    for source in sources:
        ids += [source] if isinstance(source, int) else source or []
    return tuple(dict.fromkeys(ids))

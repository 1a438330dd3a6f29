"""A GGUF file becomes an HF directory that transformers reads, with the same weights in its own order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pdserve.errors import StartupError
from pdserve.model import hub
from pdserve.model.gguf_convert import convert, hf_name

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
MERGES = [("h", "i"), ("1", "2")]
TOKENS = ["<|end|>", "<|start|>", *ALPHABET, *(left + right for left, right in MERGES), "<tool>"]
CONTROL, NORMAL, USER_DEFINED = 3, 1, 4
CHAT_TEMPLATE = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"

GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def tiny_llama(*, tie_word_embeddings: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 50000.0},
        tie_word_embeddings=tie_word_embeddings,
    )
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def gguf_name(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    if stem in whole:
        return f"{whole[stem]}.weight"
    layer, _, rest = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{GGUF_NAMES[rest]}.weight"


def to_ggml_rows(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Row by row: HF's row j * d/2 + i of a head is ggml's row 2i + j."""
    head_dim = len(weight) // num_heads
    rows = np.empty_like(weight)
    for head in range(num_heads):
        for j in range(2):
            for i in range(head_dim // 2):
                rows[head * head_dim + 2 * i + j] = weight[head * head_dim + j * head_dim // 2 + i]
    return rows


def write_gguf(path: Path, model: LlamaForCausalLM, quantized: gguf.GGMLQuantizationType | None = None) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([CONTROL] * 2 + [NORMAL] * (len(TOKENS) - 3) + [USER_DEFINED])
    writer.add_token_merges([" ".join(pair) for pair in MERGES])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            weight = to_ggml_rows(
                weight, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            )
        if quantized is not None and "layers" in name and weight.ndim == 2:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(weight, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(gguf_name(name), weight)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits(model: Any, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(torch.tensor([token_ids])).logits
    return result


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "hf"
    made.mkdir()
    return made


@pytest.mark.parametrize("tie_word_embeddings", [True, False])
def test_the_converted_model_computes_the_same_logits(
    tmp_path: Path, directory: Path, tie_word_embeddings: bool
) -> None:
    model = tiny_llama(tie_word_embeddings=tie_word_embeddings)
    write_gguf(tmp_path / "m.gguf", model)
    convert(tmp_path / "m.gguf", directory)
    converted = AutoModelForCausalLM.from_pretrained(directory)
    token_ids = list(range(2, 40))
    torch.testing.assert_close(logits(converted, token_ids), logits(model, token_ids))
    assert converted.config.tie_word_embeddings is tie_word_embeddings
    assert converted.dtype is torch.float32


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_quantized_weights_are_near_the_original(
    tmp_path: Path, directory: Path, kind: gguf.GGMLQuantizationType
) -> None:
    model = tiny_llama(tie_word_embeddings=True)
    write_gguf(tmp_path / "m.gguf", model, kind)
    convert(tmp_path / "m.gguf", directory)
    was = model.state_dict()
    largest_step = 0.02 if kind is gguf.GGMLQuantizationType.Q8_0 else 0.2
    for name, weight in AutoModelForCausalLM.from_pretrained(directory).state_dict().items():
        assert (weight - was[name]).abs().max() < largest_step, name


def test_config_has_what_readers_of_either_transformers_need(tmp_path: Path, directory: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_llama(tie_word_embeddings=True))
    convert(tmp_path / "m.gguf", directory)
    config = json.loads((directory / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 50000.0
    assert config["rms_norm_eps"] == 1e-6
    assert (config["head_dim"], config["max_position_embeddings"]) == (16, 128)
    assert json.loads((directory / "generation_config.json").read_text())["eos_token_id"] == 0


def test_the_tokenizer_sets_digits_apart_and_knows_its_special_tokens(tmp_path: Path, directory: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_llama(tie_word_embeddings=True))
    convert(tmp_path / "m.gguf", directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.tokenize("hi12<tool><|end|>") == ["hi", "1", "2", "<tool>", "<|end|>"]
    assert tokenizer.decode(tokenizer.encode("hi12 é<tool><|end|>"), skip_special_tokens=True) == "hi12 é<tool>"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|start|>hi<|end|>"


def test_progress_counts_the_tensors(tmp_path: Path, directory: Path) -> None:
    told: list[tuple[str, int, int]] = []
    write_gguf(tmp_path / "m.gguf", tiny_llama(tie_word_embeddings=True))
    convert(tmp_path / "m.gguf", directory, progress=lambda *step: told.append(step))
    assert told[-1] == ("convert the weights", 20, 20)


class TestRefused:
    def test_a_file_that_is_no_gguf(self, tmp_path: Path, directory: Path) -> None:
        (tmp_path / "m.gguf").write_bytes(b"not a model, whatever its name says")
        with pytest.raises(StartupError, match=r"m\.gguf is not a readable GGUF"):
            convert(tmp_path / "m.gguf", directory)

    def test_another_architecture_by_name(self, tmp_path: Path, directory: Path) -> None:
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        with pytest.raises(StartupError, match=r"general\.architecture is 'mamba'"):
            convert(tmp_path / "m.gguf", directory)

    @pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.ffn_gate_exps.weight", "attn_q.weight"])
    def test_a_tensor_without_a_place(self, name: str) -> None:
        with pytest.raises(StartupError, match=name):
            hf_name(name)


def test_the_embedded_model_knows_the_capital_of_france() -> None:
    directory = hub.resolve("smollm2")
    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = model.generate(**prompt, max_new_tokens=10, do_sample=False)
    assert tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :]) == "The capital of France is Paris.<|im_end|>"

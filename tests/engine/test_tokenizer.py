"""Text to tokens and back, and chat prompts, as transformers does them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from pdserve.engine.tokenizer import HfTokenizer
from pdserve.errors import InvalidRequest, StartupError
from pdserve.model import hub

TEXTS = [
    "",
    "Hello, world!",
    "  two  spaces\n\n\ttab",
    "naïve café 12345",
    "日本語のテキスト",
    "👩‍👩‍👧 family 𝄞",
    "<|im_start|>user\nhi<|im_end|>",
    "right<|im_end|>next \u2028 line",
]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is <2 & 3>?"},
    {"role": "assistant", "content": 'A "quote".'},
    {"role": "user", "content": "日本語?"},
]
CHATML = (
    "{{ bos_token }}{% for message in messages %}\n"
    "  {% if message['role'] == 'assistant' %}\n"
    "    {% generation %}{{ message.content | tojson }}{% endgeneration %}\n"
    "  {% elif message['role'] == 'nobody' %}{% break %}\n"
    "  {% else %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}\n"
    "  {% endif %}\n"
    "{% endfor %}\n"
    "{% if tools is none and add_generation_prompt %}{{ '<|im_start|>assistant\n' + eos_token }}{% endif %}"
)


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("l", "l"), ("Ġ", "w"), ("ð", "Ł"), ("1", "2")]
    tokens = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=8, pad_token="<|im_end|>")
    return tokenizer


def write_model(directory: Path, tokenizer_config: dict[str, Any], **files: Any) -> Path:
    byte_level().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": CHATML,
    }
    return write_model(tmp_path_factory.mktemp("tiny"), config)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return hub.resolve("smollm2")


@pytest.fixture(params=["tiny", "smollm2"])
def directory(request: pytest.FixtureRequest) -> Path:
    found: Path = request.getfixturevalue(request.param)
    return found


class TestEqualToTransformers:
    def test_encode_and_decode(self, directory: Path) -> None:
        ours, theirs = HfTokenizer(directory), PreTrainedTokenizerFast.from_pretrained(directory)
        for text in TEXTS:
            for special in (True, False):
                ids = ours.encode(text, add_special_tokens=special)
                assert ids == theirs.encode(text, add_special_tokens=special)
                assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)

    def test_chat_prompts(self, directory: Path) -> None:
        ours, theirs = HfTokenizer(directory), PreTrainedTokenizerFast.from_pretrained(directory)
        for chat in (CHAT, CHAT[1:], CHAT[:1]):
            assert ours.apply_chat_template(chat) == theirs.apply_chat_template(
                chat, tokenize=False, add_generation_prompt=True
            )

    def test_special_tokens_and_vocabulary(self, directory: Path) -> None:
        ours, theirs = HfTokenizer(directory), PreTrainedTokenizerFast.from_pretrained(directory)
        assert ours.special_tokens == theirs.special_tokens_map
        assert ours.vocab_size == len(theirs)
        assert ours.eos_token_ids == (theirs.eos_token_id,)


def test_text_survives_a_round_trip_through_the_embedded_model(smollm2: Path) -> None:
    tokenizer = HfTokenizer(smollm2)
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.encode("12345") == [tokenizer.encode(digit)[0] for digit in "12345"]


class TestWhereThingsAreFound:
    def test_chat_template_file_wins_over_the_config(self, tmp_path: Path) -> None:
        write_model(tmp_path, {"chat_template": "config"})
        (tmp_path / "chat_template.jinja").write_text("file")
        assert HfTokenizer(tmp_path).apply_chat_template(CHAT) == "file"

    def test_default_is_taken_from_named_templates(self, tmp_path: Path) -> None:
        named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
        assert HfTokenizer(write_model(tmp_path, {"chat_template": named})).apply_chat_template(CHAT) == "plain"

    @pytest.mark.parametrize(
        ("files", "expected"),
        [
            ({"generation_config": {"eos_token_id": [5, 7]}, "config": {"eos_token_id": 3}}, (5, 7)),
            ({"generation_config": {}, "config": {"eos_token_id": 3}}, (3,)),
            ({}, (byte_level().token_to_id("<|im_end|>"),)),
        ],
    )
    def test_eos_ids(self, tmp_path: Path, files: dict[str, Any], expected: tuple[int, ...]) -> None:
        assert HfTokenizer(write_model(tmp_path, {"eos_token": "<|im_end|>"}, **files)).eos_token_ids == expected

    def test_special_tokens_of_older_models(self, tmp_path: Path) -> None:
        write_model(tmp_path, {}, special_tokens_map={"pad_token": {"content": "<s>"}})
        assert HfTokenizer(tmp_path).special_tokens == {"pad_token": "<s>"}


class TestFaults:
    def test_no_tokenizer_json(self, tmp_path: Path) -> None:
        with pytest.raises(StartupError, match=r"has no tokenizer\.json"):
            HfTokenizer(tmp_path)

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
    @pytest.mark.parametrize("content", ["{ broken", "[1]"])
    def test_a_broken_file_is_named(self, tmp_path: Path, name: str, content: str) -> None:
        write_model(tmp_path, {})
        (tmp_path / name).write_text(content)
        with pytest.raises(StartupError, match=name):
            HfTokenizer(tmp_path)

    def test_a_template_that_does_not_parse(self, tmp_path: Path) -> None:
        with pytest.raises(StartupError, match="chat template"):
            HfTokenizer(write_model(tmp_path, {"chat_template": "{% if %}"}))

    def test_no_template(self, tmp_path: Path) -> None:
        tokenizer = HfTokenizer(write_model(tmp_path, {}))
        assert not tokenizer.has_chat_template
        with pytest.raises(InvalidRequest, match="no chat template"):
            tokenizer.apply_chat_template(CHAT)

    @pytest.mark.parametrize(
        ("template", "reason"),
        [
            ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
            ("{{ messages[0]['name'] + 1 }}", "name"),
            ("{{ 1 // 0 }}", "zero"),
            ("{{ ''.__class__.__mro__ }}", "unsafe"),
            ("{{ messages.append(1) }}", "append"),
        ],
    )
    def test_a_template_that_refuses_the_messages(self, tmp_path: Path, template: str, reason: str) -> None:
        tokenizer = HfTokenizer(write_model(tmp_path, {"chat_template": template}))
        with pytest.raises(InvalidRequest, match=reason):
            tokenizer.apply_chat_template(CHAT)

    def test_text_without_a_utf8_form(self, tiny: Path) -> None:
        with pytest.raises(InvalidRequest, match="cannot be encoded"):
            HfTokenizer(tiny).encode("half a pair: \ud83d")

    @pytest.mark.parametrize("wrong", [-1, 1 << 40])
    def test_ids_that_cannot_be(self, tiny: Path, wrong: int) -> None:
        with pytest.raises(InvalidRequest, match=str(wrong)):
            HfTokenizer(tiny).decode([1, wrong])


def test_threads_share_one_tokenizer(tiny: Path) -> None:
    tokenizer = HfTokenizer(tiny)
    wrong: list[str] = []

    def work(text: str) -> None:
        for _ in range(200):
            if tokenizer.decode(tokenizer.encode(text)) != text:
                wrong.append(text)

    threads = [threading.Thread(target=work, args=(f"text {i} é",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []

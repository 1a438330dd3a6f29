"""A model's own tokenizer and chat template, read from its HF directory without transformers.

Equal to transformers' `encode`, `decode` and `apply_chat_template` for the models served; a test compares them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdserve.errors import InvalidRequest, StartupError

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class HfTokenizer:
    """rpc.generator.Tokenizer over tokenizer.json. Any thread may call it.

    special_tokens: text by name (`bos_token` ...), as the chat template sees them. eos_token_ids: tokens that end an
    answer. vocab_size: ids are below it; the model's own vocabulary may be padded beyond.
    """

    def __init__(self, directory: Path) -> None:
        """Raises StartupError where a file is missing or cannot be read."""
        self._tokenizer = _load_tokenizer(directory / "tokenizer.json")
        config = _read_json(directory / "tokenizer_config.json")
        self.special_tokens = _special_tokens(_read_json(directory / "special_tokens_map.json") | config)
        self.eos_token_ids = self._find_eos_token_ids(directory)
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self._template = _load_template(directory, config)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Raises InvalidRequest for text that has no UTF-8 form."""
        try:
            # The batch call lets other threads run meanwhile, the single one does not.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            ids: list[int] = encoding.ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequest(f"text cannot be encoded: {error}") from error
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are no UTF-8 become U+FFFD, unknown ids nothing.

        Raises InvalidRequest for an id that cannot be one.
        """
        try:
            text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            wrong = next((i for i in token_ids if not 0 <= i < 1 << 32), None)
            raise InvalidRequest(f"token_ids has {wrong}, ids are 0 to {self.vocab_size - 1}") from error
        return text

    def apply_chat_template(self, messages: Sequence[dict[str, str]]) -> str:
        """The model's prompt for `messages`, with the opening of its answer; see rpc.generator.Tokenizer."""
        if self._template is None:
            raise InvalidRequest("messages: this model has no chat template; send text or token ids")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self.special_tokens,
            )
        except Exception as error:
            # The template is a program that came with the model; on messages it did not expect it may raise anything.
            raise InvalidRequest(f"messages: the model's chat template refused them: {error}") from error

    def _find_eos_token_ids(self, directory: Path) -> tuple[int, ...]:
        """generation_config.json decides, then config.json, then the tokenizer's own eos_token."""
        for name in ("generation_config.json", "config.json"):
            found = _read_json(directory / name).get("eos_token_id")
            if found is not None:
                return tuple(found) if isinstance(found, list) else (found,)
        own = self._tokenizer.token_to_id(self.special_tokens.get("eos_token", ""))
        return () if own is None else (own,)


def _load_tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise StartupError(
            f"model directory {path.parent} has no tokenizer.json; pdserve needs the fast tokenizer's file"
        )
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        # The package raises plain Exception for every fault of the file.
        raise StartupError(f"{path} is not a tokenizer this version can read ({error}); fetch it again") from error
    # Settings of whoever trained it; a prompt is never cut or filled silently.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; empty if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise StartupError(f"{path} holds a {type(content).__name__}, an object was expected; fetch it again")
    return content


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by name; files give each as a string or as an object with `content`."""
    texts = {name: config.get(name) for name in _SPECIAL_TOKENS}
    contents = {name: text.get("content") if isinstance(text, dict) else text for name, text in texts.items()}
    return {name: text for name, text in contents.items() if isinstance(text, str)}


# ---------------------------------------------------------------- chat template


def _load_template(directory: Path, config: Mapping[str, Any]) -> jinja2.Template | None:
    """chat_template.jinja, else what tokenizer_config.json has: one template, or a list of named ones."""
    path = directory / "chat_template.jinja"
    source = path.read_text(encoding="utf-8") if path.is_file() else config.get("chat_template")
    if isinstance(source, list):
        source = {entry["name"]: entry["template"] for entry in source}.get("default")
    if not isinstance(source, str):
        return None
    try:
        return _environment().from_string(source)
    except jinja2.TemplateError as error:
        raise StartupError(f"the chat template of {directory} does not parse ({error}); fetch it again") from error


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here its content is all that counts."""

    tags = {"generation"}  # noqa: RUF012 (jinja's declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """What a chat template may use: the set transformers documents for template writers, in a sandbox."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models were trained on it; jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)

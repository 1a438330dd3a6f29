"""Text of an answer as its tokens come, and where stop strings cut it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from pdserve.engine.text import Detokenizer, StopScan, TextStream
from pdserve.engine.tokenizer import HfTokenizer
from pdserve.errors import InvalidRequest

FEW = settings(max_examples=150, deadline=None)
SPECIAL = "<|end|>"


def byte_level() -> Tokenizer:
    """All 256 bytes as tokens, a few merges, some of which end inside a character; one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "w"), ("ð", "Ł"), ("ã", "ģ"), ("â", "Ĥ"), ("a", "â")]
    tokens = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Words with a leading ▁ whose first is stripped, and <0x..> tokens for what is not in the vocabulary."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlorw", "he", "▁w"]
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [("h", "e"), ("▁", "w")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


def saved(tokenizer: Tokenizer, directory: Path) -> HfTokenizer:
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL}))
    return HfTokenizer(directory)


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return saved(byte_level(), tmp_path_factory.mktemp("byte_level"))


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    return saved(byte_fallback(), tmp_path_factory.mktemp("byte_fallback"))


def split(token_ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    """Pieces of the given sizes in turn (0 too), until the ids are used up."""
    pieces, start = [], 0
    for size in sizes:
        pieces.append(list(token_ids[start : start + size]))
        start += size
    return [*pieces, list(token_ids[start:])]


def run(stream: TextStream, pieces: Sequence[Sequence[int]]) -> tuple[str, str | None]:
    """The joined text and what stopped it."""
    texts = []
    for i, piece in enumerate(pieces):
        delta = stream.push(piece, is_last=i == len(pieces) - 1)
        texts.append(delta.text)
        if delta.matched_stop is not None:
            return "".join(texts), delta.matched_stop
    return "".join(texts), None


def first_stop(text: str, stop: Sequence[str]) -> tuple[str, str | None]:
    """The specification of a cut: try every end, longest string first."""
    for end in range(len(text) + 1):
        for string in sorted(stop, key=len, reverse=True):
            if text[:end].endswith(string):
                return text[: end - len(string)], string
    return text, None


piece_sizes = st.lists(st.integers(0, 5), max_size=40)
texts = st.text(st.sampled_from("helo wäあ€😀𝄞\ufffd\n"), max_size=30)
any_byte_tokens = st.lists(st.integers(0, 264), max_size=60)


class TestJoinedTextIsTheDecodedText:
    @FEW
    @given(token_ids=any_byte_tokens, sizes=piece_sizes, skip=st.booleans())
    def test_for_any_tokens_valid_utf8_or_not(
        self, bytewise: HfTokenizer, token_ids: list[int], sizes: list[int], skip: bool
    ) -> None:
        text, _ = run(TextStream(bytewise, (), skip), split(token_ids, sizes))
        assert text == bytewise.decode(token_ids, skip_special_tokens=skip)

    @FEW
    @given(text=texts, sizes=piece_sizes, skip=st.booleans(), ends=st.integers(0, 3))
    def test_for_byte_fallback_and_stripped_spaces(
        self, fallback: HfTokenizer, text: str, sizes: list[int], skip: bool, ends: int
    ) -> None:
        end = fallback.encode(SPECIAL, add_special_tokens=False)[-1:]
        token_ids = end * ends + fallback.encode(text) + end * ends + fallback.encode(text)
        streamed, _ = run(TextStream(fallback, (), skip), split(token_ids, sizes))
        assert streamed == fallback.decode(token_ids, skip_special_tokens=skip)

    @FEW
    @given(text=texts)
    def test_token_by_token_no_unfinished_character_is_sent(self, bytewise: HfTokenizer, text: str) -> None:
        text = text.replace("\ufffd", "")
        stream = TextStream(bytewise)
        sent = "".join(stream.push([token]).text for token in bytewise.encode(text))
        assert "\ufffd" not in sent
        assert text.startswith(sent)

    @pytest.mark.parametrize("kind", ["bytewise", "fallback"])
    @pytest.mark.parametrize("unsettled", ["\ufffd", "wrong byte", SPECIAL])
    def test_a_long_answer_is_decoded_in_short_windows(
        self, kind: str, unsettled: str, request: pytest.FixtureRequest
    ) -> None:
        tokenizer: HfTokenizer = request.getfixturevalue(kind)
        widest = 0

        class Measured:
            def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
                nonlocal widest
                widest = max(widest, len(token_ids))
                return tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

        wrong_byte = tokenizer.encode("€")[-1:]
        run = wrong_byte if unsettled == "wrong byte" else tokenizer.encode(unsettled)
        token_ids = tokenizer.encode("hello あ€😀" * 20) + tokenizer.encode(" ") + run * 100 + tokenizer.encode("end")
        detokenizer = Detokenizer(Measured())
        sent = "".join(detokenizer.push([token]) for token in token_ids) + detokenizer.flush()
        assert sent == tokenizer.decode(token_ids)
        assert widest < 32


class TestStopStrings:
    @FEW
    @given(
        text=st.text(st.sampled_from("abä"), max_size=30),
        stop=st.lists(st.text(st.sampled_from("abä"), min_size=1, max_size=4), max_size=4),
        sizes=piece_sizes,
    )
    def test_cut_at_the_first_complete_match_however_tokens_are_split(
        self, bytewise: HfTokenizer, text: str, stop: list[str], sizes: list[int]
    ) -> None:
        streamed = run(TextStream(bytewise, tuple(stop)), split(bytewise.encode(text), sizes))
        assert streamed == first_stop(text, stop)

    @pytest.mark.parametrize(
        ("text", "stop", "expected"),
        [
            ("hello world", ("lo w",), ("hel", "lo w")),
            ("aaab", ("aab",), ("a", "aab")),
            ("abcabd", ("abd",), ("abc", "abd")),
            ("abcd", ("abcd", "bc"), ("a", "bc")),
            ("xabc", ("c", "abc"), ("x", "abc")),
            ("price 5€ net", ("€",), ("price 5", "€")),
            ("😀stop", ("stop",), ("😀", "stop")),
            ("stop", ("stop",), ("", "stop")),
            ("no match: sto", ("stop",), ("no match: sto", None)),
        ],
    )
    def test_straddling_tokens_and_overlapping_themselves(
        self, bytewise: HfTokenizer, text: str, stop: tuple[str, ...], expected: tuple[str, str | None]
    ) -> None:
        token_ids = bytewise.encode(text)
        assert run(TextStream(bytewise, stop), [[token] for token in token_ids]) == expected
        assert run(TextStream(bytewise, stop), [token_ids]) == expected

    def test_only_a_possible_beginning_is_held_back(self) -> None:
        scan = StopScan(("abcd",))
        assert scan.push("xyab").text == "xy"
        assert scan.held == "ab"
        assert scan.push("ca").text == "abc"
        assert scan.held == "a"

    def test_text_of_the_first_min_tokens_ends_nothing(self, bytewise: HfTokenizer) -> None:
        token_ids = bytewise.encode("ab ab ab")
        for pieces in ([token_ids], [[token] for token in token_ids]):
            stream = TextStream(bytewise, ("ab",), min_tokens=4)
            assert run(stream, pieces) == ("ab ab ", "ab")

    def test_many_stop_strings_are_one_walk_over_the_text(self, bytewise: HfTokenizer) -> None:
        stop = tuple(f"stop{i}." for i in range(5000))
        assert run(TextStream(bytewise, stop), split(bytewise.encode("stop stop12 stop4321. x"), [3] * 9)) == (
            "stop stop12 ",
            "stop4321.",
        )

    def test_an_empty_stop_string_is_refused_by_its_place(self, bytewise: HfTokenizer) -> None:
        with pytest.raises(InvalidRequest, match=r"stop\[1\]"):
            TextStream(bytewise, ("a", ""))

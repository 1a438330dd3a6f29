"""Token ids to text as they come, and the stop strings that end it.

    token ids ─► Detokenizer ─► settled text ─► StopScan ─► text the caller gets
                 keeps unfinished characters    keeps what may become a stop string

Each stage keeps back only what later tokens may still change, and the last push lets go of it.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pdserve.errors import InvalidRequest

_REPLACEMENT = "\ufffd"
# A token of text has a byte at least, so this many hold a whole UTF-8 character.
_CHARACTER_TOKENS = 4
# So many tokens whose text never settles are bytes that are no text.
_UNSETTLED_TOKENS = 16


class TokenDecoder(Protocol):
    """The half of a tokenizer this needs."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; what is no UTF-8 becomes U+FFFD."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Text to pass on now. matched_stop: the stop string that ended the answer; it and what follows are cut off."""

    text: str
    matched_stop: str | None = None


class TextStream:
    """The text of one answer, delta by delta. A token's cost does not grow with the answer.

    The texts of all pushes joined are decode(all tokens), or its part before the first stop string, however the tokens
    were split into pushes. *First* is the one that is complete first; of two complete at once, the longer. The text of
    the first `min_tokens` tokens ends no answer. (Decoders with byte fallback turn a whole run of bytes to U+FFFD for
    one wrong byte; there this holds as long as the bytes are UTF-8.)
    """

    def __init__(
        self,
        tokenizer: TokenDecoder,
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        """Raises InvalidRequest for an empty stop string."""
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens)
        self._scan = StopScan(stop) if stop else None
        self._num_exempt_tokens = min_tokens if stop else 0

    def push(self, token_ids: Sequence[int], is_last: bool = False) -> TextDelta:
        """The text that `token_ids` settle. A matched stop or the last push ends the stream."""
        exempt = token_ids[: self._num_exempt_tokens]
        self._num_exempt_tokens -= len(exempt)
        exempt_text = self._detokenizer.push(exempt)
        text = self._detokenizer.push(token_ids[len(exempt) :])
        if is_last:
            text += self._detokenizer.flush()
        if self._scan is None:
            return TextDelta(text)
        found = self._scan.push(text)
        rest = self._scan.held if is_last and found.matched_stop is None else ""
        return TextDelta(exempt_text + found.text + rest, found.matched_stop)


class Detokenizer:
    """Incremental decode: always of a short window, of whose text a known part was passed on before.

        window     [ context | fresh                                                   ]
        its text   [ ........ passed on ........ | U+FFFD, perhaps an unfinished character ]

    The context are tokens from before, since a token's text may depend on its neighbour (a word's leading space).
    """

    def __init__(self, tokenizer: TokenDecoder, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._text = ""  # of the window
        self._num_context = 0  # tokens
        self._num_passed_on = 0  # characters of the window's text, the context's included

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is settled by these tokens. One by one: an unfinished character is the last token's then."""
        return "".join([self._push(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """What was held, as it stands."""
        return self._pass_on(len(self._text))

    def _push(self, token_id: int) -> str:
        text = self._decode([*self._window, token_id])
        if text == self._text and self._is_invisible(token_id):
            return ""
        self._window.append(token_id)
        self._text = text
        new = self._pass_on(len(text.rstrip(_REPLACEMENT)))
        if new and self._num_passed_on == len(text):
            self._restart_window()
        elif len(self._window) - self._num_context >= _UNSETTLED_TOKENS:
            new += self._cut_window()
        return new

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)

    def _is_invisible(self, token_id: int) -> bool:
        """Whether it is no text in any place (a special token). Asked twice over, as a first space may be stripped."""
        return not self._decode((token_id, token_id))

    def _pass_on(self, num_characters: int) -> str:
        """The window's text up to there, without what was passed on before."""
        new = self._text[self._num_passed_on : num_characters]
        self._num_passed_on += len(new)
        return new

    def _restart_window(self) -> None:
        """All text was passed on: what is fresh becomes the context."""
        self._window = self._window[self._num_context :]
        self._text = self._decode(self._window)
        self._num_context, self._num_passed_on = len(self._window), len(self._text)

    def _cut_window(self) -> str:
        """Pass on what cannot change any more of a window that does not settle, so that it stays short."""
        size = len(self._window)
        for cut in range(size - 1, size - 1 - _CHARACTER_TOKENS, -1):
            for start in range(cut - 1, cut - 1 - _CHARACTER_TOKENS, -1):
                if self._may_cut(start, cut):
                    new = self._pass_on(len(self._decode(self._window[:cut])))
                    context = self._decode(self._window[start:cut])
                    self._window = self._window[start:]
                    self._text = self._decode(self._window)
                    self._num_context, self._num_passed_on = cut - start, len(context)
                    return new
        return ""  # within an unfinished character: the next tokens bring a cut

    def _may_cut(self, start: int, cut: int) -> bool:
        """Whether the tokens before `cut` are final and [start, cut) is context enough for those from it on.

        Two sides that decode to the whole meet at the edge of a character, which later tokens leave where it is.
        """
        left, right = self._decode(self._window[:cut]), self._decode(self._window[cut:])
        is_edge = right != "" and len(left) >= self._num_passed_on and left + right == self._text
        context = self._decode(self._window[start:cut])
        return is_edge and context + right == self._decode(self._window[start:])


class StopScan:
    """Looks for stop strings in text that comes in pieces (Aho and Corasick 1975: one step a character).

    held: the end of the text so far that a stop string may begin with.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        """Raises InvalidRequest for an empty stop string."""
        self._automaton = _automaton(stop)
        self._state = 0
        self.held = ""

    def push(self, text: str) -> TextDelta:
        """The text that is part of no stop string, up to the first match."""
        seen = self.held + text
        for end, character in enumerate(text, start=len(self.held) + 1):
            self._state = self._automaton.step(self._state, character)
            matched = self._automaton.matched[self._state]
            if matched is not None:
                return TextDelta(seen[: end - len(matched)], matched)
        num_free = len(seen) - self._automaton.depth[self._state]
        self.held = seen[num_free:]
        return TextDelta(seen[:num_free])


@functools.lru_cache(maxsize=32)
def _automaton(stop: tuple[str, ...]) -> _Automaton:
    """Shared by the samples of a request, and by requests with the same stop strings."""
    return _Automaton(stop)


class _Automaton:
    """A trie of strings with failure links. State = the longest end of the text that is the beginning of a string.

    next: the trie's edges. fail: the longest proper end of the state that is a state. depth: its characters.
    matched: the longest string that ends in the state. State 0 is the empty text.
    """

    def __init__(self, strings: tuple[str, ...]) -> None:
        if "" in strings:
            raise InvalidRequest(f"stop[{strings.index('')}] is empty; a stop string has at least one character")
        self.next: list[dict[str, int]] = [{}]
        self.fail = [0]
        self.depth = [0]
        self.matched: list[str | None] = [None]
        for string in strings:
            self._add(string)
        self._link()

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while state and character not in self.next[state]:
            state = self.fail[state]
        return self.next[state].get(character, 0)

    def _add(self, string: str) -> None:
        state = 0
        for depth, character in enumerate(string, start=1):
            if character not in self.next[state]:
                self.next[state][character] = len(self.next)
                self.next.append({})
                self.fail.append(0)
                self.depth.append(depth)
                self.matched.append(None)
            state = self.next[state][character]
        self.matched[state] = string

    def _link(self) -> None:
        """Breadth first: a state's failure link is shallower than the state, so it is complete by then."""
        queue = deque(self.next[0].values())
        while queue:
            state = queue.popleft()
            self.matched[state] = self.matched[state] or self.matched[self.fail[state]]
            for character, child in self.next[state].items():
                self.fail[child] = self.step(self.fail[state], character)
                queue.append(child)

import io
import sys

import pytest

from pdserve import cli
from pdserve.client import Client
from pdserve.commands import chat
from pdserve.rpc.fake import EchoGenerator


class ScriptedTerminal:
    """Says the lines; interrupts the answer whose turn is in `interrupts`, at its first text."""

    def __init__(self, lines: list[str | BaseException], interrupts: frozenset[int] = frozenset()) -> None:
        self._lines = iter(lines)
        self._interrupts = interrupts
        self._turn = 0
        self.notes: list[str] = []
        self.written = ""

    def ask(self) -> str:
        self._turn += 1
        line = next(self._lines, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    def write(self, text: str) -> None:
        self.written += text
        if self._turn in self._interrupts:
            raise KeyboardInterrupt

    def note(self, line: str) -> None:
        self.notes.append(line)


def test_chat_sends_the_whole_conversation_each_turn(target: str) -> None:
    terminal = ScriptedTerminal(["one", "", "two"])
    with Client(target) as client:
        conversation = chat.Conversation(client, {"max_new_tokens": 6}, system="Be kind.")
        chat.converse(conversation, terminal)
    assert [message["role"] for message in conversation.messages] == ["system", *["user", "assistant"] * 2]
    assert conversation.messages[2]["content"] == "system"
    assert terminal.written == "system" * 2


def test_chat_forgets_on_reset_but_for_the_system_s_words(target: str) -> None:
    terminal = ScriptedTerminal(["one", "/reset"])
    with Client(target) as client:
        conversation = chat.Conversation(client, {"max_new_tokens": 2}, system="Be kind.")
        chat.converse(conversation, terminal)
    assert conversation.messages == [{"role": "system", "content": "Be kind."}]


def test_ctrl_c_ends_an_answer_and_not_the_conversation(target: str, generator: EchoGenerator) -> None:
    generator.hold_after = 1
    terminal = ScriptedTerminal(["one", KeyboardInterrupt(), "/reset"], interrupts=frozenset({1}))
    with Client(target) as client:
        conversation = chat.Conversation(client, {"max_new_tokens": 9}, system=None)
        chat.converse(conversation, terminal)
    assert terminal.notes == ["ended", chat.HINT, "forgotten"]


def test_a_turn_that_fails_leaves_no_trace(target: str) -> None:
    terminal = ScriptedTerminal(["x" * 9000, "short"])
    with Client(target) as client:
        conversation = chat.Conversation(client, {"max_new_tokens": 2}, system=None)
        chat.converse(conversation, terminal)
    assert "8192" in terminal.notes[0]
    assert [message["content"] for message in conversation.messages] == ["short", "us"]


def test_chat_runs_over_pipes(target: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    assert cli.main(["chat", "--target", target, "--max-new-tokens", "4"]) == 0
    assert "you> user" in capsys.readouterr().out

"""`pdserve chat`: a conversation with a running node. Ctrl-C ends an answer, Ctrl-D the conversation."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Protocol

from pdserve.client import Client, GenerateOptions
from pdserve.commands.arguments import read
from pdserve.commands.measured import measure, one_line
from pdserve.commands.parsing import add_sampling, add_target, command_parser, connected, sampling_given
from pdserve.errors import PdserveError

HINT = "Ctrl-C ends an answer, /reset forgets the conversation, Ctrl-D leaves."


class Terminal(Protocol):
    """Where the conversation takes place."""

    def ask(self) -> str:
        """What the person says next. Raises EOFError when they leave, KeyboardInterrupt for Ctrl-C."""

    def write(self, text: str) -> None:
        """A piece of the answer."""

    def note(self, line: str) -> None:
        """A line that is not part of the answer."""


class Conversation:
    """The messages so far, each answer with what came of it before it was ended."""

    def __init__(self, client: Client, options: GenerateOptions, system: str | None) -> None:
        self._client = client
        self._options = options
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._opening)

    def reset(self) -> None:
        self.messages = list(self._opening)

    def say(self, text: str, terminal: Terminal) -> None:
        """One turn. An answer that fails leaves no trace, so that the next turn isn't refused for it too."""
        messages = [*self.messages, {"role": "user", "content": text}]
        said: list[str] = []

        def on_text(piece: str) -> None:
            said.append(piece)
            terminal.write(piece)

        options: GenerateOptions = {**self._options, "messages": messages}
        with self._client.stream(**options) as stream:
            try:
                note = one_line(measure(stream, on_text))
            except KeyboardInterrupt:
                note = "ended"
            except PdserveError as error:
                terminal.note(error.message)
                return
        terminal.note(note)
        self.messages = [*messages, {"role": "assistant", "content": "".join(said)}]


def converse(conversation: Conversation, terminal: Terminal) -> None:
    """Turn by turn until the person leaves."""
    while True:
        try:
            text = terminal.ask().strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            terminal.note(HINT)
            continue
        if text == "/reset":
            conversation.reset()
            terminal.note("forgotten")
        elif text:
            conversation.say(text, terminal)


class ColourTerminal:
    """Standard input and output, with rich for looks."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False)

    def ask(self) -> str:
        return self._console.input("[bold cyan]you>[/bold cyan] ")

    def write(self, text: str) -> None:
        print(text, end="", flush=True)

    def note(self, line: str) -> None:
        self._console.print(f"\n{line}", style="dim", markup=False)


class PlainTerminal:
    """The same without colours, for where rich isn't installed or nobody looks."""

    def ask(self) -> str:
        return input("you> ")

    def write(self, text: str) -> None:
        print(text, end="", flush=True)

    def note(self, line: str) -> None:
        print(f"\n{line}")


def main(argv: list[str]) -> int:
    """Talks until the person leaves."""
    parser = command_parser("chat", "", "Talk with a running node. " + HINT, "pdserve chat --temperature 0.7")
    parser.add_argument("--system", metavar="TEXT", help="how the model is to behave")
    add_target(parser)
    add_sampling(parser)
    arguments = read(parser, argv)
    with connected(arguments) as client, _line_editing():
        terminal = _terminal()
        model = client.model_info(timeout_s=10.0)
        terminal.note(f"{model.served_name}, up to {model.max_model_len} tokens. {HINT}")
        converse(Conversation(client, sampling_given(arguments), arguments.system), terminal)
    print()
    return 0


def _terminal() -> Terminal:
    if sys.stdin.isatty() and sys.stdout.isatty():
        with contextlib.suppress(ModuleNotFoundError):
            return ColourTerminal()
    return PlainTerminal()


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Arrow keys and earlier lines, where Python has them."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  # importing it is what turns it on
    yield

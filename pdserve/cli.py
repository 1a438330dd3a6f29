"""`pdserve COMMAND`: finds the command and turns its errors into one line.

Each command is a module with `main(argv) -> exit status`, imported only when it is asked for, so that client commands
start without torch and the node's settings.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdserve import __version__
from pdserve.errors import PdserveError, StartupError

FAILED, USAGE, INTERRUPTED = 1, 2, 130


class Command(NamedTuple):
    """Where a command lives, and its line in the list of commands."""

    module: str
    summary: str


COMMANDS = {
    "serve": Command("pdserve.commands.serve", "one node: fused, prefill or decode"),
    "up": Command("pdserve.commands.up", "a prefill node and a decode node on this machine"),
    "generate": Command("pdserve.commands.generate", "one answer from a running node"),
    "chat": Command("pdserve.commands.chat", "a conversation with a running node"),
    "status": Command("pdserve.commands.status", "do nodes serve, and what do their ranks have on their hands"),
    "trace": Command("pdserve.commands.trace", "what each rank ran, round by round, and what the prefill gate said"),
    "pull": Command("pdserve.commands.pull", "fetch a model into the cache"),
    "simulate": Command("pdserve.commands.simulate", "what a policy or a topology would do, before there are machines"),
    "bench": Command("pdserve.commands.bench", "what real nodes do on this machine, beside the simulator"),
    "doctor": Command("pdserve.doctor", "what works on this machine, and what doesn't and why"),
    "demo": Command("pdserve.demo", "the whole thing in one minute: prefill + decode nodes beside one fused node"),
}


def usage() -> str:
    """The list of commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: pdserve COMMAND [flags]",
            "",
            "Serves language models with prefill and decode on different nodes, or on one fused node.",
            "",
            *lines,
            "",
            "`pdserve COMMAND --help` tells more. example:",
            "  pdserve up smollm2            then, in another terminal:",
            '  pdserve generate "Why is the sky blue?"',
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit status: 0 done, 1 failed, 2 wrongly called or unable to start, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    name = words[0] if words else "--help"
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"pdserve {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"pdserve: there is no command {name}\n\n{usage()}", file=sys.stderr)
        return USAGE
    return _run(name, words[1:])


def _run(name: str, words: list[str]) -> int:
    try:
        command: Callable[[list[str]], int] = importlib.import_module(COMMANDS[name].module).main
        return command(words)
    except PdserveError as error:
        print(f"pdserve {name}: {error.message}", file=sys.stderr)
        return USAGE if isinstance(error, StartupError) else FAILED
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("pdserve"):
            raise
        print(f'pdserve {name}: {error.name} is missing; pip install "pdserve[node]"', file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        # What a command started, it has ended on its way here.
        print(f"pdserve {name}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output left. Python flushes once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED


if __name__ == "__main__":
    sys.exit(main())

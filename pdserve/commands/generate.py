"""`pdserve generate PROMPT`: one answer from a running node, streamed to standard output."""

from __future__ import annotations

import sys

from pdserve.commands.arguments import read, real
from pdserve.commands.measured import measure, one_line
from pdserve.commands.parsing import add_json, add_sampling, add_target, command_parser, connected, sampling_given
from pdserve.commands.tables import write_json


def main(argv: list[str]) -> int:
    """The answer on standard output, a line about it on standard error."""
    parser = command_parser(
        "generate",
        "PROMPT",
        "Ask a running node for one answer.",
        'pdserve generate "Why is the sky blue?" --max-new-tokens 32 --temperature 0',
    )
    parser.add_argument("prompt", metavar="PROMPT", help="what to ask; - reads standard input")
    parser.add_argument("--raw", action="store_true", help="continue PROMPT as it stands, without the chat template")
    parser.add_argument(
        "--timeout-s", type=real("--timeout-s", above=0), metavar="S", help="give up after this long (default: never)"
    )
    add_target(parser)
    add_sampling(parser)
    add_json(parser)
    arguments = read(parser, argv)
    prompt: str = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    options = sampling_given(arguments)
    if not arguments.raw:
        options["messages"] = [{"role": "user", "content": prompt}]
    text = prompt if arguments.raw else None
    with (
        connected(arguments, arguments.timeout_s) as client,
        client.stream(text, **options) as stream,
    ):
        answer = measure(stream, _nothing if arguments.json == "-" else _write)
    if arguments.json != "-":
        print()
        print(one_line(answer), file=sys.stderr)
    if arguments.json:
        write_json(arguments.json, answer.figures())
    return 0


def _write(text: str) -> None:
    print(text, end="", flush=True)


def _nothing(text: str) -> None:
    """Standard output is for the JSON alone."""

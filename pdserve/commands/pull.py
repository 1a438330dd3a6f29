"""`pdserve pull NAME`: fetches a model into the cache, so that no node has to at its start."""

from __future__ import annotations

from pdserve.commands.parsing import command_parser
from pdserve.model import hub
from pdserve.model.progress import show_progress


def main(argv: list[str]) -> int:
    """Prints the directory the model lies in."""
    parser = command_parser(
        "pull", "MODEL", "Fetch a model into the cache; a second time checks what is there.", "pdserve pull smollm2"
    )
    parser.add_argument(
        "model", metavar="MODEL", help="smollm2, smollm2-moe (made of it: 4 experts), or a hub id such as org/name"
    )
    name: str = parser.parse_args(argv).model
    with show_progress() as progress:
        directory = hub.pull(name, progress=progress)
    print(directory)
    return 0

"""`pdserve simulate WHAT`: the production scheduler under a virtual clock, before there are machines."""

from __future__ import annotations

import importlib
from typing import NamedTuple

from pdserve.errors import StartupError


class Simulated(NamedTuple):
    """Where a subcommand lives, module and function, and its line in the list."""

    module: str
    function: str
    summary: str


HERE = "pdserve.commands.simulate"
WHAT = {
    "interference": Simulated(f"{HERE}.pair", "interference", "a stream beside a long prompt, and published figures"),
    "poisson": Simulated(f"{HERE}.loads", "poisson", "requests by chance, so many a second"),
    "closed": Simulated(f"{HERE}.loads", "closed", "users who ask, wait, think and ask again"),
    "trace": Simulated(f"{HERE}.replay", "trace", "recorded requests"),
    "tune": Simulated(f"{HERE}.tune", "tune", "which flags serve a workload best"),
    "gate": Simulated(f"{HERE}.gate", "gate", "what the prefill gate costs and gives, over its intervals"),
}
CALIBRATE = "--calibrate"


def usage() -> str:
    """The list of what can be simulated."""
    width = max(map(len, WHAT))
    lines = [f"  {name:{width}}  {what.summary}" for name, what in WHAT.items()]
    return "\n".join(
        [
            "usage: pdserve simulate WHAT [flags]",
            f"       pdserve simulate {CALIBRATE} FILE    measures what this machine costs, on real nodes",
            "",
            "The scheduler that serves, under a virtual clock: what a policy or a topology would do.",
            "",
            *lines,
            "",
            "`pdserve simulate WHAT --help` tells more. example:",
            "  pdserve simulate poisson --rate 0.3 --num-prefill-nodes 1 --num-decode-nodes 2",
        ]
    )


def main(argv: list[str]) -> int:
    """Runs one; 0 when all that it checks is met."""
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(usage())
        # As argparse leaves after its help.
        raise SystemExit(0)
    if name.partition("=")[0] == CALIBRATE:
        return _run("pdserve.bench.calibrate", "main", argv)
    if name not in WHAT:
        raise StartupError(f"there is nothing called {name} to simulate; known are {', '.join(WHAT)}")
    return _run(WHAT[name].module, WHAT[name].function, argv[1:])


def _run(module: str, function: str, argv: list[str]) -> int:
    status: int = getattr(importlib.import_module(module), function)(argv)
    return status

"""`pdserve bench MEASUREMENT`: what this machine does with real nodes, and how far the simulator is from it."""

from __future__ import annotations

import importlib

from pdserve.errors import StartupError

MEASUREMENTS = {
    "engine": ("pdserve.bench.speed.engine", "tokens a second of the engine alone, and where a round's time goes"),
    "speed": ("pdserve.bench.speed.command", "tokens a second of pdserve and of the other engines, in turns"),
    "serve": ("pdserve.bench.serve.command", "servers under load, judged by what their clients saw"),
    "interference": ("pdserve.bench.interference.command", "a stream beside a long prompt, policy by policy"),
    "fidelity": ("pdserve.bench.fidelity.command", "the simulator against real nodes under the same requests"),
    "chaos": ("pdserve.bench.chaos.command", "two prefill and two decode nodes under random faults"),
    "peers": ("pdserve.bench.peers.command", "vLLM's prefill and decode nodes under the same requests"),
    "flags": ("pdserve.bench.flags.command", "what scheduling flags are worth on a real node, and in the simulator"),
}


def usage() -> str:
    """The list of measurements."""
    width = max(map(len, MEASUREMENTS))
    lines = [f"  {name:{width}}  {summary}" for name, (_, summary) in MEASUREMENTS.items()]
    return "\n".join(
        [
            "usage: pdserve bench MEASUREMENT [flags]",
            "",
            *lines,
            "",
            "`pdserve bench MEASUREMENT --help` tells more. example:",
            "  pdserve bench interference --quick",
        ]
    )


def main(argv: list[str]) -> int:
    """Runs one; 0 when all that it checks is met."""
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help"):
        print(usage())
        # As argparse leaves after its help.
        raise SystemExit(0)
    if name not in MEASUREMENTS:
        raise StartupError(f"there is no measurement {name}; known are {', '.join(MEASUREMENTS)}")
    module, _ = MEASUREMENTS[name]
    status: int = importlib.import_module(module).main(argv[1:])
    return status

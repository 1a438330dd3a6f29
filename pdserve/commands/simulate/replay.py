"""`pdserve simulate trace FILE`: recorded traffic."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pdserve.commands.arguments import missing, read_file, real, whole
from pdserve.commands.simulate.flags import Asked, read_flags, simulate_parser
from pdserve.commands.simulate.output import run_and_tell
from pdserve.faults import Fault
from pdserve.sim.trace import Trace


def trace(argv: list[str]) -> int:
    """Replays it; 1 where requests failed."""
    parser = simulate_parser(
        "pdserve simulate trace",
        "A trace of real requests, such as those published with the Mooncake paper (FAST'25): JSON lines with\n"
        "timestamp, input_length, output_length and hash_ids.",
        "pdserve simulate trace --file conversation_trace.jsonl --costs seed-context --limit 500 --rate-scale 0.05",
    )
    group = parser.add_argument_group("Traffic")
    group.add_argument("--file", type=read_file("--file"), metavar="FILE", help="the trace")
    group.add_argument(
        "--rate-scale", type=real("--rate-scale", above=0), metavar="X", help="2 = arrivals twice as dense (default: 1)"
    )
    group.add_argument("--limit", type=whole("--limit", 1), metavar="N", help="only the first N requests")
    asked = read_flags(argv, parser, more=_missing)
    own = vars(asked.own)
    scale, limit = own.get("rate_scale", 1.0), own.get("limit")
    workload = Trace(Path(own["file"]), scale, limit)
    first = f"the first {limit:,} requests of " if limit else ""
    return run_and_tell(asked, workload, f"{first}{workload.path.name} at {scale:g} × its rate")


def _missing(asked: Asked) -> Iterable[Fault]:
    return () if "file" in vars(asked.own) else missing("--file", "say which trace")

"""The flags that every simulation has: the deployment, named as `pdserve serve` names it, and what is written."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pdserve.commands.arguments import as_fault, faults_by_name, picture, real, refuse, whole, written_file
from pdserve.config import flags, parse_flags
from pdserve.config.fields import FIELDS, Settings, flag_name
from pdserve.config.sources import from_text, read_layers
from pdserve.errors import StartupError
from pdserve.faults import Fault, unless_about
from pdserve.sim import cost_files
from pdserve.sim.cost_files import CostFile
from pdserve.sim.deployment import COUNTS, SETTINGS, Deployment
from pdserve.sim.report import Slo

DEFAULT_COSTS = "smollm2-cpu"
# Settings of the node that say something here; the others are read from a --config file and left aside.
SHOWN = (*SETTINGS, "config")
COUNT_FLAGS = {
    "data_parallel_size": ("--dp", "ranks of each fused node, whose rounds begin and end together"),
    "num_nodes": (None, "fused nodes"),
    "num_prefill_nodes": (None, "prefill nodes; with --num-decode-nodes, instead of fused ones"),
    "num_decode_nodes": (None, "decode nodes"),
    "prefill_data_parallel_size": ("--prefill-dp", "ranks of each prefill node"),
    "decode_data_parallel_size": ("--decode-dp", "ranks of each decode node"),
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What the flags say. own: the subcommand's, None where not given. has_knobs: some flag is about the deployment."""

    cost_file: CostFile
    deployment: Deployment
    seed: int
    slo: Slo
    json: str | None
    png: str | None
    html: str | None
    has_costs: bool
    has_knobs: bool
    own: argparse.Namespace


def simulate_parser(prog: str, purpose: str, example: str, *, draws: bool = True) -> flags.FlagParser:
    """A parser of a command that simulates, which adds flags of its own, whose defaults are None.

    draws: it has pictures of the rounds.
    """
    parser = flags.FlagParser(
        prog=prog,
        usage=f"{prog} [flags]",
        description=f"{purpose}\nKnobs without a flag are as in the cost file, or as a node's defaults.",
        epilog=f"example:\n  {example}",
    )
    group = parser.add_argument_group("Simulation")
    group.add_argument("--costs", metavar="NAME|FILE", help=f"what things cost (default: {DEFAULT_COSTS}); {_names()}")
    group.add_argument(
        "--seed", type=whole("--seed", 0), metavar="N", help="the same seed gives the same figures (default: 0)"
    )
    group.add_argument(
        "--slo-ttft-ms", type=real("--slo-ttft-ms", above=0), metavar="MS", help="goodput: longest time to first token"
    )
    group.add_argument(
        "--slo-itl-ms",
        type=real("--slo-itl-ms", above=0),
        metavar="MS",
        help="goodput: limit of each request's own p99 of ITL",
    )
    output = parser.add_argument_group("Output")
    json_file = written_file("--json", may_be_output=True)
    output.add_argument(
        "--json", type=json_file, metavar="FILE", help="write the figures as JSON; - is standard output"
    )
    if draws:
        output.add_argument("--png", type=picture("--png"), metavar="FILE", help="draw the rounds of all ranks")
        html = written_file("--html")
        output.add_argument("--html", type=html, metavar="FILE", help="the same as a page to zoom in")
    _add_counts(parser)
    flags.add_flags(parser, {name: field for name, field in FIELDS.items() if name in SHOWN})
    return parser


def _names() -> str:
    return f"shipped are {', '.join(cost_files.shipped())}"


def _add_counts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Nodes and ranks")
    for name, (short, text) in COUNT_FLAGS.items():
        words = [flags.spelled(name), *([short] if short else [])]
        group.add_argument(*words, dest=name, metavar="N", help=text)


def no_more(asked: Asked) -> Iterable[Fault]:
    """No rule between a subcommand's flags."""
    return ()


def read_flags(
    argv: list[str],
    parser: flags.FlagParser,
    default_costs: str = DEFAULT_COSTS,
    more: Callable[[Asked], Iterable[Fault]] = no_more,
) -> Asked:
    """What is asked. more: what is wrong between the subcommand's flags; one that is wrong by itself seems not given.

    Raises ConfigError with everything that is wrong.
    """
    given, faults = parse_flags(argv, parser)
    for name, fault in faults_by_name(given):
        faults.append(fault)
        given.pop(name, None)
    costs_name = given.pop("costs", None)
    cost_file, unreadable = _cost_file(costs_name or default_costs)
    counts = {name: from_text(given.pop(name), [int]) for name in COUNTS if name in given}
    texts = {name: given.pop(name) for name in SHOWN if name in given}
    settings, wrong = read_layers({"model": cost_file.costs.name, **texts})
    faults += [*unreadable, *wrong]
    knobs = {name: getattr(settings, name) for name in SETTINGS if name in settings.model_fields_set}
    deployment = cost_file.deployment.replace(**knobs, **counts)
    if not unreadable:
        faults += [*_block_size_faults(settings, cost_file), *unless_about(faults, deployment.faults())]
    asked = _asked(cost_file, deployment, given, costs_name is not None, bool(knobs or counts))
    refuse([*faults, *(() if unreadable else unless_about(faults, more(asked)))])
    return asked


def _cost_file(name: str) -> tuple[CostFile, list[Fault]]:
    """What is read on with where the named one can't be is the default."""
    try:
        return cost_files.load(name), []
    except StartupError as error:
        return cost_files.load(DEFAULT_COSTS), [as_fault("--costs", name, error)]


def _asked(
    cost_file: CostFile, deployment: Deployment, given: dict[str, Any], has_costs: bool, has_knobs: bool
) -> Asked:
    return Asked(
        cost_file,
        deployment,
        seed=given.pop("seed", 0),
        slo=Slo(_seconds("--slo-ttft-ms", given), _seconds("--slo-itl-ms", given)),
        json=given.pop("json", None),
        png=given.pop("png", None),
        html=given.pop("html", None),
        has_costs=has_costs,
        has_knobs=has_knobs,
        own=argparse.Namespace(**given),
    )


def _seconds(flag: str, given: dict[str, Any]) -> float | None:
    value = given.pop(flag[2:].replace("-", "_"), None)
    return None if value is None else float(value) / 1e3


def _block_size_faults(settings: Settings, cost_file: CostFile) -> Iterable[Fault]:
    """A --config file or variable may say it; costs are those of one size."""
    size = cost_file.costs.block_size
    if "block_size" in settings.model_fields_set and settings.block_size != size:
        yield Fault(flag_name("block_size"), settings.block_size, f"the costs are of blocks of {size} tokens")

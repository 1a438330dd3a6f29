"""`pdserve simulate tune`: which flags serve a workload best, and how sure that is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from pdserve.commands.arguments import missing, one_of, read_file, real, whole
from pdserve.commands.simulate.flags import Asked, read_flags, simulate_parser
from pdserve.commands.simulate.output import console_of, describe, timeline_of, write_pictures
from pdserve.commands.tables import write_json
from pdserve.config import flags
from pdserve.faults import Fault
from pdserve.sim import advice
from pdserve.sim.goals import Goal, GoodputGoal, ItlGoal, RanksGoal
from pdserve.sim.presets import PRESETS, preset
from pdserve.sim.simulation import Simulation
from pdserve.sim.traffic import Sample, Traffic, preset_traffic, trace_traffic
from pdserve.sim.trials import OnProgress, silent
from pdserve.sim.tune import Entry, Question, Tuned
from pdserve.sim.tune import tune as tuned_by

GOALS = ("itl", "goodput", "gpus")
MOST_LOAD = 10.0
LOAD, NUM_REQUESTS, BUDGET, ATTAINMENT = 0.7, 200, 150, 0.95
# Ranks that the goal `gpus` looks at, unless it is told: twice what there is, and some to choose from.
MORE_RANKS, SOME_RANKS = 2, 8


def tune(argv: list[str]) -> int:
    """0, whatever is recommended."""
    asked = read_flags(argv, _parser(), more=_misplaced)
    question = _question(asked)
    console = console_of(asked)
    console.print(f"[bold]{question.goal.text}[/bold]: {question.traffic.text}, costs {asked.deployment.costs.name}")
    console.print(f"as given: {asked.deployment.describe()}", style="dim")
    with _progress(question.budget) as on_progress:
        tuned = tuned_by(question, on_progress)
        capacity = advice.Capacity(
            question.traffic.capacity_per_s(tuned.default.deployment),
            question.traffic.capacity_per_s(tuned.pick.deployment),
        )
    _print(tuned, capacity, console)
    _draw(asked, tuned, question.traffic)
    if asked.json:
        found = {"traffic": question.traffic.text, **describe(asked), **advice.figures(tuned, capacity)}
        write_json(asked.json, found)
    return 0


def _parser() -> flags.FlagParser:
    parser = simulate_parser(
        "pdserve simulate tune",
        "Searches prefill policies, chunk size, mixed rounds and, where asked, the shape of the deployment for what\n"
        "serves a goal best. The flags given are what it starts from and compares with.",
        "pdserve simulate tune --goal goodput --slo-ttft-ms 2000 --slo-itl-ms 200 --workload chat",
    )
    goal = parser.add_argument_group("Goal")
    goal.add_argument(
        "--goal",
        type=one_of("--goal", GOALS),
        metavar="|".join(GOALS),
        help="itl: p99 ITL within --itl-p99-ms, then the least p99 TTFT; goodput: the most requests a second within "
        "the SLO; gpus: the fewest ranks that keep it",
    )
    goal.add_argument(
        "--itl-p99-ms",
        type=real("--itl-p99-ms", above=0),
        metavar="MS",
        help="(itl) limit of p99 ITL, of all gaps together",
    )
    goal.add_argument(
        "--attainment",
        type=real("--attainment", above=0, most=1),
        metavar="SHARE",
        help=f"(gpus) of the requests within the SLO (default: {ATTAINMENT})",
    )
    goal.add_argument(
        "--max-ranks",
        type=whole("--max-ranks", 1),
        metavar="N",
        help="(gpus) most ranks (default: twice those given, 8)",
    )
    traffic = parser.add_argument_group("Traffic")
    kinds = "; ".join(f"{one.name}: {one.summary}" for one in PRESETS.values())
    traffic.add_argument(
        "--workload", type=one_of("--workload", PRESETS), metavar="|".join(PRESETS), help=f"{kinds} (default: chat)"
    )
    traffic.add_argument(
        "--trace",
        type=read_file("--trace"),
        metavar="FILE",
        help="recorded requests instead; its second half is held out",
    )
    load = f"of what the deployment as given can take (default: {LOAD})"
    traffic.add_argument("--load", type=real("--load", above=0, most=MOST_LOAD), metavar="SHARE", help=load)
    requests = f"of each simulation (default: {NUM_REQUESTS})"
    traffic.add_argument("--requests", type=whole("--requests", 1), metavar="N", help=requests)
    search = parser.add_argument_group("Search")
    search.add_argument(
        "--budget", type=whole("--budget", 1), metavar="N", help=f"simulations to search with (default: {BUDGET})"
    )
    search.add_argument(
        "--try-shapes",
        action="store_true",
        default=None,
        help="other DP sizes and ratios of prefill to decode nodes too",
    )
    return parser


# ---------------------------------------------------------------- what is asked


def _goal_name(own: dict[str, Any]) -> str | None:
    name: str | None = own.get("goal", "itl" if "itl_p99_ms" in own else None)
    return name


def _misplaced(asked: Asked) -> Iterator[Fault]:
    """What a goal lacks, and what is of another one."""
    own = vars(asked.own)
    name = _goal_name(own)
    if name is None:
        yield from missing("--goal", f"give one of {', '.join(GOALS)}")
    elif name == "itl" and "itl_p99_ms" not in own:
        yield from missing("--itl-p99-ms", "--goal itl keeps p99 ITL within so many milliseconds")
    elif name != "itl" and asked.slo.ttft_s is None and asked.slo.itl_s is None:
        yield Fault("--goal", name, "needs an SLO; give --slo-ttft-ms, --slo-itl-ms, or both")
    if name not in (None, "itl") and "itl_p99_ms" in own:
        reason = f"is of --goal itl; --slo-itl-ms is what --goal {name} heeds"
        yield Fault("--itl-p99-ms", f"{own['itl_p99_ms']:g}", reason)
    for flag in ("max_ranks", "attainment"):
        if name not in (None, "gpus") and flag in own:
            yield Fault(flags.spelled(flag), own[flag], "is of --goal gpus; leave it out")
    if "trace" in own and "workload" in own:
        yield Fault("--workload", own["workload"], f"and --trace {own['trace']} are two; give one of them")


def _question(asked: Asked) -> Question:
    own, default = vars(asked.own), asked.deployment
    return Question(
        default,
        _goal(asked, own),
        _traffic(asked, own),
        own.get("budget", BUDGET),
        try_shapes=bool(own.get("try_shapes")),
        most_ranks=own.get("max_ranks", max(MORE_RANKS * default.num_ranks, SOME_RANKS)),
        seed=asked.seed,
    )


def _goal(asked: Asked, own: dict[str, Any]) -> Goal:
    match _goal_name(own):
        case "itl":
            return ItlGoal(own["itl_p99_ms"] / 1e3, asked.slo)
        case "goodput":
            return GoodputGoal(asked.slo)
        case _:
            return RanksGoal(asked.slo, own.get("attainment", ATTAINMENT))


def _traffic(asked: Asked, own: dict[str, Any]) -> Traffic:
    load, num_requests = own.get("load", LOAD), own.get("requests", NUM_REQUESTS)
    if "trace" in own:
        return trace_traffic(Path(own["trace"]), asked.deployment, load, num_requests)
    return preset_traffic(preset(own.get("workload", "chat")), asked.deployment, load, num_requests)


# ---------------------------------------------------------------- what came of it


@contextlib.contextmanager
def _progress(budget: int) -> Iterator[OnProgress]:
    """A bar where somebody looks. The search may end before its budget, and the check comes on top of it."""
    console = Console(stderr=True)
    if not sys.stderr.isatty():
        yield silent
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed} simulations"))
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("", total=budget)
        yield lambda num_run, stage: bar.update(
            task, completed=num_run, total=max(budget, num_run + 1), description=stage
        )


def _print(tuned: Tuned, capacity: advice.Capacity, console: Console) -> None:
    """Who was how good, which flags they are, and what follows."""
    titles = ["\n".join(advice.WORDS[name]) for name in COLUMNS]
    table = Table("", *titles, box=SIMPLE, pad_edge=False)
    named = (
        {"as given": tuned.default} if tuned.pick is tuned.default else {"as given": tuned.default, "pick": tuned.pick}
    )
    named |= {f"next {number}": entry for number, entry in enumerate(tuned.runners_up, 1)}
    for name, entry in named.items():
        values = advice.means(entry)
        table.add_row(name, *(_cell(column, values[column]) for column in COLUMNS))
    console.print(table)
    for name, entry in list(named.items())[1:]:
        console.print(f"{name}: {advice.changes(entry.deployment, tuned.default.deployment)}", style="dim")
    console.print(f"{tuned.num_run} simulations; means of {len(tuned.pick.runs)} samples that the search has not seen")
    for sentence in advice.sentences(tuned, capacity):
        console.print(sentence, soft_wrap=True)


COLUMNS = ("itl_p99_s", "worst_gap_s", "ttft_p50_s", "ttft_p99_s", "output_tokens_per_s", "goodput_per_s", "met_share")


def _cell(name: str, value: float) -> str:
    scaled = value * advice.SCALES.get(advice.WORDS[name][1], 1.0)
    return f"{scaled:,.0f}" if scaled >= 100 else f"{scaled:.3g}"


def _draw(asked: Asked, tuned: Tuned, traffic: Traffic) -> None:
    """The rounds of what is recommended, on one sample."""
    entry: Entry = tuned.recommended
    timeline = timeline_of(asked, f"{traffic.text}: {entry.deployment.describe()}")
    if timeline is None:
        return
    deployment, sample = entry.deployment, Sample(asked.seed, is_held_out=True)
    topology = deployment.topology()
    Simulation(topology, deployment.costs, traffic.workload(sample), timeline, sample.seed).run()
    write_pictures(asked, timeline)

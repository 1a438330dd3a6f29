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

from pdserve.commands.simulate.flags import Asked, read_flags, simulate_parser
from pdserve.commands.simulate.output import console_of, describe, timeline_of, write_pictures
from pdserve.commands.tables import write_json
from pdserve.config import flags
from pdserve.errors import StartupError
from pdserve.sim import advice
from pdserve.sim.goals import Goal, GoodputGoal, ItlGoal, RanksGoal
from pdserve.sim.presets import PRESETS, preset
from pdserve.sim.simulation import Simulation
from pdserve.sim.traffic import Sample, Traffic, preset_traffic, trace_traffic
from pdserve.sim.trials import OnProgress, silent
from pdserve.sim.tune import Entry, Question, Tuned
from pdserve.sim.tune import tune as tuned_by

GOALS = ("itl", "goodput", "gpus")
LOAD, NUM_REQUESTS, BUDGET, ATTAINMENT = 0.7, 200, 150, 0.95
# Ranks that the goal `gpus` looks at, unless it is told: twice what there is, and some to choose from.
MORE_RANKS, SOME_RANKS = 2, 8


def tune(argv: list[str]) -> int:
    """0, whatever is recommended."""
    asked = read_flags(argv, _parser())
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
        metavar="|".join(GOALS),
        help="itl: p99 ITL within --itl-p99-ms, then the least p99 TTFT; goodput: the most requests a second within "
        "the SLO; gpus: the fewest ranks that keep it",
    )
    goal.add_argument("--itl-p99-ms", type=float, metavar="MS", help="(itl) limit of p99 ITL, of all gaps together")
    goal.add_argument(
        "--attainment",
        type=float,
        metavar="SHARE",
        help=f"(gpus) of the requests within the SLO (default: {ATTAINMENT})",
    )
    goal.add_argument("--max-ranks", type=int, metavar="N", help="(gpus) most ranks (default: twice those given, 8)")
    traffic = parser.add_argument_group("Traffic")
    kinds = "; ".join(f"{one.name}: {one.summary}" for one in PRESETS.values())
    traffic.add_argument("--workload", metavar="|".join(PRESETS), help=f"{kinds} (default: chat)")
    traffic.add_argument("--trace", metavar="FILE", help="recorded requests instead; its second half is held out")
    load = f"of what the deployment as given can take (default: {LOAD})"
    traffic.add_argument("--load", type=float, metavar="SHARE", help=load)
    requests = f"of each simulation (default: {NUM_REQUESTS})"
    traffic.add_argument("--requests", type=int, metavar="N", help=requests)
    search = parser.add_argument_group("Search")
    search.add_argument("--budget", type=int, metavar="N", help=f"simulations to search with (default: {BUDGET})")
    search.add_argument(
        "--try-shapes",
        action="store_true",
        default=None,
        help="other DP sizes and ratios of prefill to decode nodes too",
    )
    return parser


# ---------------------------------------------------------------- what is asked


def _question(asked: Asked) -> Question:
    own, default = vars(asked.own), asked.deployment
    goal = _goal(asked, own)
    if not isinstance(goal, RanksGoal) and "max_ranks" in own:
        raise StartupError(f"--max-ranks {own['max_ranks']} is of --goal gpus; leave it out")
    return Question(
        default,
        goal,
        _traffic(asked, own),
        _at_least_one("--budget", own.get("budget", BUDGET)),
        try_shapes=bool(own.get("try_shapes")),
        most_ranks=_at_least_one("--max-ranks", own.get("max_ranks", max(MORE_RANKS * default.num_ranks, SOME_RANKS))),
        seed=asked.seed,
    )


def _goal(asked: Asked, own: dict[str, Any]) -> Goal:
    name = own.get("goal", "itl" if "itl_p99_ms" in own else None)
    if name not in GOALS:
        given = "is missing" if name is None else f"{name} is no goal"
        raise StartupError(f"--goal {given}; give one of {', '.join(GOALS)}")
    if name == "itl":
        return _itl_goal(asked, own)
    if "itl_p99_ms" in own:
        raise StartupError(
            f"--itl-p99-ms {own['itl_p99_ms']:g} is of --goal itl; --slo-itl-ms is what --goal {name} heeds"
        )
    if asked.slo.ttft_s is None and asked.slo.itl_s is None:
        raise StartupError(f"--goal {name} needs an SLO; give --slo-ttft-ms, --slo-itl-ms, or both")
    if name == "goodput":
        return GoodputGoal(asked.slo)
    return RanksGoal(asked.slo, _share("--attainment", own.get("attainment", ATTAINMENT), 1.0))


def _itl_goal(asked: Asked, own: dict[str, Any]) -> Goal:
    limit_ms = own.get("itl_p99_ms")
    if limit_ms is None or not limit_ms > 0:
        given = "is missing" if limit_ms is None else f"{limit_ms:g} must be more than 0"
        raise StartupError(f"--itl-p99-ms {given}; --goal itl keeps p99 ITL within so many milliseconds")
    return ItlGoal(limit_ms / 1e3, asked.slo)


def _traffic(asked: Asked, own: dict[str, Any]) -> Traffic:
    load = _share("--load", own.get("load", LOAD), 10.0)
    num_requests = _at_least_one("--requests", own.get("requests", NUM_REQUESTS))
    if "trace" not in own:
        return preset_traffic(preset(own.get("workload", "chat")), asked.deployment, load, num_requests)
    if "workload" in own:
        raise StartupError(f"--workload {own['workload']} and --trace {own['trace']} are two; give one of them")
    return trace_traffic(Path(own["trace"]), asked.deployment, load, num_requests)


def _share(flag: str, value: float, most: float) -> float:
    if not 0 < value <= most:
        raise StartupError(f"{flag} {value:g} must be more than 0 and at most {most:g}")
    return value


def _at_least_one(flag: str, value: int) -> int:
    if value < 1:
        raise StartupError(f"{flag} {value} must be at least 1")
    return value


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

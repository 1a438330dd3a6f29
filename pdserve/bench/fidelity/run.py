"""A run of `pdserve bench fidelity`: every load on real nodes and in the simulator, and what is shown of it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.bench.deployed import Deployed, fused, pair
from pdserve.bench.fidelity.command import QUICK_ARRIVALS_S
from pdserve.bench.fidelity.figures import Compared, compare, figures
from pdserve.bench.fidelity.loads import LOADS, Load, calls, rate_for
from pdserve.bench.fidelity.speed import Speed, probe
from pdserve.bench.policy_runs import Model
from pdserve.bench.simulated import hear_simulated
from pdserve.commands.tables import write_json
from pdserve.model import hub
from pdserve.model.progress import Progress, show_progress
from pdserve.node_process import interrupted_by_sigterm
from pdserve.sim.deployment import Deployment
from pdserve.sim.workload import SimRequest

# Noise is drawn anew for each.
NUM_SIMULATED = 3
NODES = ("fused", "pair")


@dataclass(frozen=True, slots=True)
class Result:
    """One load on one deployment. nodes: `fused` or `pair`. speeds: of the machine in each real run."""

    load: str
    nodes: str
    rate_per_s: float
    num_requests: int
    speeds: list[Speed]
    compared: list[Compared]


def run(arguments: argparse.Namespace) -> int:
    """0 when every figure is within its tolerance."""
    arrivals_s = QUICK_ARRIVALS_S if arguments.quick else arguments.seconds
    loads = [load for load in LOADS if not arguments.only or load.name in arguments.only]
    with interrupted_by_sigterm(), show_progress() as progress:
        model = Model.of(hub.resolve(arguments.model, progress=progress))
        results = measure(model, arguments.costs.deployment, loads, arrivals_s, arguments.repeats, progress)
    _print(results, Console(highlight=False, stderr=arguments.json == "-"))
    if arguments.json:
        write_json(arguments.json, [_as_json(result) for result in results])
    return int(not all(figure.is_met for result in results for figure in result.compared))


def measure(
    model: Model, deployment: Deployment, loads: Sequence[Load], arrivals_s: float, repeats: int, progress: Progress
) -> list[Result]:
    """Every load on a fused node, then every load on a pair."""
    deployments = {"fused": deployment, "pair": deployment.replace(num_prefill_nodes=1, num_decode_nodes=1)}
    rates = {load.name: rate_for(load, list(deployments.values()), arrivals_s) for load in loads}
    results: list[Result] = []
    num_runs = len(NODES) * len(loads) * repeats
    progress("asking", 0, num_runs)
    for nodes in NODES:
        with serving(nodes, model, deployment) as node:
            for load in loads:
                requests = load.requests(rates[load.name], arrivals_s)
                real, speeds = [], []
                for repeat in range(repeats):
                    name = f"{load.name} {repeat}"
                    before = probe(node, model, f"{name} before")
                    real.append(figures(node.hear_all(calls(requests, model, load.name, repeat))))
                    speeds.append(Speed.of([before, probe(node, model, f"{name} after")], deployments[nodes]))
                    progress("asking", len(results) * repeats + repeat + 1, num_runs)
                simulated = [run for speed in speeds for run in _simulated(speed.applied(deployments[nodes]), requests)]
                compared = compare(real, simulated)
                results.append(Result(load.name, nodes, rates[load.name], len(requests), speeds, compared))
    return results


def serving(nodes: str, model: Model, deployment: Deployment) -> AbstractContextManager[Deployed]:
    """The real nodes that the deployment is of."""
    start = {"fused": fused, "pair": pair}[nodes]
    return start(
        model,
        chunked_prefill_size=deployment.chunked_prefill_size,
        max_num_seqs=deployment.max_num_seqs,
        num_kv_blocks=deployment.num_kv_blocks,
        block_size=deployment.costs.block_size,
    )


def _simulated(deployment: Deployment, requests: Sequence[SimRequest]) -> list[dict[str, float]]:
    return [figures(hear_simulated(deployment, requests, seed)) for seed in range(NUM_SIMULATED)]


def _print(results: Sequence[Result], console: Console) -> None:
    for result in results:
        speeds = ", ".join(f"{speed.prefill:.2f} and {speed.decode:.2f}" for speed in result.speeds)
        console.print(
            f"[bold]{result.load}, {result.nodes}[/bold]: {result.num_requests} requests, {result.rate_per_s:.2f} a "
            f"second; rounds of prefill and decode took {speeds} of the cost file's"
        )
        table = Table("ms", "real", "spread", "simulated", "error", "", box=SIMPLE)
        for figure in result.compared:
            table.add_row(
                figure.name.removesuffix("_s").replace("_", " "),
                f"{figure.real_s * 1e3:.1f}",
                f"{figure.spread_s * 1e3:.1f}",
                f"{figure.simulated_s * 1e3:.1f}",
                f"{figure.error:+.1%}",
                "ok" if figure.is_met else "[red]FAILED[/red]",
            )
        console.print(table)


def _as_json(result: Result) -> dict[str, object]:
    figures = [{**asdict(figure), "error": figure.error, "is_met": figure.is_met} for figure in result.compared]
    return {**asdict(result), "compared": figures}

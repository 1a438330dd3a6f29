"""A cost model from real nodes: a fused node with all cores, then a prefill and a decode node with a core each."""

from __future__ import annotations

import dataclasses
import itertools
import platform
import statistics
import time
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.table import Table

from pdserve.bench.calibration.copies import measure_tiers
from pdserve.bench.calibration.derived import handoff_costs, noise_of, rank_costs
from pdserve.bench.calibration.fit import Observation, fit
from pdserve.bench.calibration.plan import ONE_THREAD, CalibrationPlan
from pdserve.bench.calibration.probes import Prober
from pdserve.bench.deployed import fused, pair
from pdserve.bench.listening import Heard
from pdserve.bench.policy_runs import Model
from pdserve.config.environment import num_cores
from pdserve.errors import StartupError
from pdserve.model.model_config import read_config
from pdserve.model.progress import Progress
from pdserve.sim.cost_files import CostFile
from pdserve.sim.costs import CostModel, FrontCosts
from pdserve.sim.deployment import Deployment

DEADLINE_S = 1200.0
BLOCK_SIZE = 64


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one deployment. gaps_s: of each decode batch, in the order of the last observations."""

    observations: list[Observation]
    gaps_s: list[list[float]]
    handoffs: list[Heard] = dataclasses.field(default_factory=list)


@dataclass(slots=True)
class Steps:
    """Progress by observation, and the deadline."""

    name: str
    num_steps: int
    progress: Progress
    deadline_s: float
    num_done: int = 0

    def one_done(self) -> None:
        """Raises StartupError past the deadline."""
        self.num_done += 1
        self.progress(self.name, min(self.num_done, self.num_steps), self.num_steps)
        if time.monotonic() > self.deadline_s:
            raise StartupError(
                f"calibration isn't done after {DEADLINE_S:g} s: the machine is busy with something else; try again"
            )


def calibrate(
    model: Model,
    name: str,
    model_name: str,
    progress: Progress,
    plan: CalibrationPlan | None = None,
    one_thread: CalibrationPlan | None = None,
) -> tuple[CostFile, Table]:
    """The cost file, and each observation beside what it predicts."""
    plan, one_thread = plan or CalibrationPlan(), one_thread or ONE_THREAD
    deadline_s = time.monotonic() + DEADLINE_S
    whole = measure_fused(model, plan, progress, deadline_s)
    split = measure_pair(model, one_thread, progress, deadline_s)
    config = read_config(model.directory)
    layout = config.kv_layout(BLOCK_SIZE)
    fused_fit, split_fit = fit(whole.observations), fit(split.observations)
    alone = rank_costs(split_fit)
    tiers = measure_tiers(layout.block_bytes)
    costs = CostModel(
        name=name,
        source=_source(model_name),
        block_size=layout.block_size,
        block_bytes=layout.block_bytes,
        fused=rank_costs(fused_fit),
        prefill=alone,
        decode=alone,
        handoff=handoff_costs(
            split.handoffs,
            split_fit,
            fused_fit["front_s"],
            layout.block_size,
            layout.block_bytes,
            tiers.host_bytes_per_s,
        ),
        tiers=tiers,
        front=FrontCosts(fused_fit["front_s"] / 2, fused_fit["front_s"] / 2),
        noise=noise_of([*whole.gaps_s, *split.gaps_s]),
    )
    errors = {"fused": _errors(whole, fused_fit), "pair": _errors(split, split_fit)}
    longest = min(config.max_position_embeddings, plan.num_kv_blocks * layout.block_size)
    deployment = Deployment(costs, plan.num_kv_blocks, max_model_len=longest, max_num_seqs=plan.max_num_seqs)
    table = _table({"fused": (whole, fused_fit), "pair": (split, split_fit)})
    return CostFile(costs, deployment, _fit_figures(errors)), table


def measure_fused(model: Model, plan: CalibrationPlan, progress: Progress, deadline_s: float) -> Measured:
    """With all cores, and two sizes of chunks."""
    steps = Steps("measuring a fused node", _num_steps(plan), progress, deadline_s)
    with fused(model, chunked_prefill_size=plan.chunk, block_size=BLOCK_SIZE, **plan.settings) as node:
        measured = _measure(Prober(node, model), plan, steps)
    if plan.other_lengths:
        with fused(model, chunked_prefill_size=plan.other_chunk, block_size=BLOCK_SIZE, **plan.settings) as node:
            for observation in Prober(node, model).prefills(plan, plan.other_lengths):
                measured.observations.append(
                    dataclasses.replace(observation, what=f"{observation.what} by {plan.other_chunk}")
                )
                steps.one_done()
    return measured


def measure_pair(model: Model, plan: CalibrationPlan, progress: Progress, deadline_s: float) -> Measured:
    """Prompts computed by the one node, decoded by the other, one at work at a time."""
    steps = Steps("measuring a prefill and a decode node", _num_steps(plan), progress, deadline_s)
    with pair(model, chunked_prefill_size=plan.chunk, block_size=BLOCK_SIZE, **plan.settings) as node:
        prober = Prober(node, model)
        measured = _measure(prober, plan, steps)
        for heard in prober.handoffs(plan):
            measured.handoffs.append(heard)
    return measured


def _num_steps(plan: CalibrationPlan) -> int:
    return len(plan.lengths) + len(plan.groups) + len(plan.batches) * plan.num_passes + len(plan.other_lengths)


def _measure(prober: Prober, plan: CalibrationPlan, steps: Steps) -> Measured:
    measured = Measured([], [])
    for observation in itertools.chain(prober.prefills(plan, plan.lengths), prober.groups(plan)):
        measured.observations.append(observation)
        steps.one_done()
    fastest: dict[str, tuple[Observation, list[float]]] = {}
    for observation, gaps_s in itertools.chain.from_iterable(prober.decodes(plan) for _ in range(plan.num_passes)):
        if observation.what not in fastest or observation.seconds < fastest[observation.what][0].seconds:
            fastest[observation.what] = observation, gaps_s
        steps.one_done()
    for observation, gaps_s in fastest.values():
        measured.observations.append(observation)
        measured.gaps_s.append(gaps_s)
    return measured


def _errors(measured: Measured, coefficients: dict[str, float]) -> list[float]:
    return [abs(seen.error(coefficients)) for seen in measured.observations]


def _fit_figures(errors: dict[str, list[float]]) -> dict[str, float]:
    figures = {}
    for name, found in errors.items():
        figures[f"{name}_median_error"] = round(statistics.median(found), 4)
        figures[f"{name}_worst_error"] = round(max(found), 4)
    return figures


def _table(fits: dict[str, tuple[Measured, dict[str, float]]]) -> Table:
    table = Table("", "what", "measured ms", "model ms", "error", box=SIMPLE)
    for name, (measured, coefficients) in fits.items():
        for seen in measured.observations:
            table.add_row(
                name,
                seen.what,
                f"{seen.seconds * 1e3:.1f}",
                f"{seen.predicted_s(coefficients) * 1e3:.1f}",
                f"{seen.error(coefficients):+.1%}",
            )
    return table


def _source(model_name: str) -> str:
    return (
        f"measured by pdserve simulate --calibrate: {model_name} on {num_cores()} cores ({platform.machine()}), "
        "a fused node with all of them, a prefill and a decode node with one thread and a core each"
    )

"""A run of a calibration, to the cost file that it writes."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from pdserve.bench.calibration.measure import calibrate
from pdserve.bench.policy_runs import Model
from pdserve.model import hub
from pdserve.model.progress import show_progress
from pdserve.node_process import interrupted_by_sigterm
from pdserve.sim import cost_files


def run(path: Path, model_name: str) -> int:
    """0 when the cost file is written to `path`."""
    console = Console(highlight=False)
    with interrupted_by_sigterm(), show_progress() as progress:
        model = Model.of(hub.resolve(model_name, progress=progress))
        name = path.name.removesuffix(cost_files.ENDING)
        found, table = calibrate(model, name, model_name, progress)
    console.print(table)
    cost_files.save(found, path)
    console.print(f"wrote {path}; use it with --costs {path}")
    return 0

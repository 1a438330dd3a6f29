"""What the simulator says of the same rows, with costs measured beforehand."""

from __future__ import annotations

from typing import Any

from pdserve.bench.interference.cases import Experiment
from pdserve.bench.interference.served import ATTACKER, VICTIM, Row
from pdserve.bench.simulated import hear_simulated
from pdserve.errors import StartupError
from pdserve.sim.costs import CostModel
from pdserve.sim.deployment import Deployment
from pdserve.sim.workload import SimRequest


def predict(row: Row, experiment: Experiment, costs: CostModel) -> Row:
    """The row's case with as many tokens of the victim as were heard, and the attacker's call at the same moment."""
    settings: dict[str, Any] = {**experiment.settings, **row.case.settings}
    if settings.pop("block_size") != costs.block_size:
        raise StartupError(
            f"the costs are of blocks of {costs.block_size} tokens, the nodes' hold {experiment.block_size}: "
            "give a cost file that was measured with the same"
        )
    deployment = Deployment(costs, **settings)
    if row.case.is_split:
        deployment = deployment.replace(num_prefill_nodes=1, num_decode_nodes=1)
    requests = [SimRequest(VICTIM, 0.0, experiment.victim_prompt, len(row.victim.token_ids))]
    if row.attacker is not None:
        called_s = row.attacker.called_s - row.victim.called_s
        requests.append(SimRequest(ATTACKER, called_s, experiment.attacker_prompt, experiment.num_asked))
    return Row(row.case, *hear_simulated(deployment, requests, seed=0))

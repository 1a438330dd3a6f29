"""How fast the machine is just now, beside what its cost file says.

A virtual machine's speed drifts by some ten per cent within minutes. What is compared is the model and not the weather:
one request before and one after each load tell by how much both kinds of round are slower than the file has them.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.deployed import Deployed
from pdserve.bench.listening import Call, Heard, unique_prompt
from pdserve.bench.policy_runs import Model
from pdserve.bench.simulated import hear_simulated
from pdserve.sim.costs import CostModel, Curve, RankCosts
from pdserve.sim.deployment import Deployment
from pdserve.sim.workload import SimRequest

PROBE = SimRequest(0, 0.0, num_prompt_tokens=700, num_output_tokens=30)


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds of today over seconds of the cost file, of rounds of either kind: 1.1 is a tenth slower."""

    prefill: float
    decode: float

    @classmethod
    def of(cls, heard: Sequence[Heard], deployment: Deployment) -> Speed:
        """heard: answers to PROBE, on an idle deployment."""
        (modelled,) = hear_simulated(deployment.replace(costs=without_noise(deployment.costs)), [PROBE], seed=0)
        return cls(
            statistics.mean(answer.ttft_s for answer in heard) / modelled.ttft_s,
            statistics.mean(_gap_s(answer) for answer in heard) / _gap_s(modelled),
        )

    def applied(self, deployment: Deployment) -> Deployment:
        """The deployment on a machine of this speed."""
        costs = deployment.costs
        return deployment.replace(
            costs=dataclasses.replace(
                costs,
                fused=self._slower(costs.fused),
                prefill=self._slower(costs.prefill),
                decode=self._slower(costs.decode),
            )
        )

    def _slower(self, costs: RankCosts) -> RankCosts:
        return RankCosts(
            prefill_fixed_s=costs.prefill_fixed_s * self.prefill,
            prefill_token_s=costs.prefill_token_s * self.prefill,
            prefill_token_context_s=costs.prefill_token_context_s * self.prefill,
            decode_fixed_s=costs.decode_fixed_s * self.decode,
            decode_row_s=costs.decode_row_s * self.decode,
            decode_context_s=costs.decode_context_s * self.decode,
            prefill_curve=_scaled(costs.prefill_curve, self.prefill),
            decode_curve=_scaled(costs.decode_curve, self.decode),
        )


def without_noise(costs: CostModel) -> CostModel:
    """A probe's model is the middle of what it may be."""
    return dataclasses.replace(costs, noise=0.0)


def probe(node: Deployed, model: Model, seed: str) -> Heard:
    """PROBE on the idle node; another seed is another prompt, of which nothing is cached."""
    prompt = unique_prompt(model.text, PROBE.num_prompt_tokens, f"probe {seed}")
    return node.hear_all([Call(PROBE.number, prompt, PROBE.num_output_tokens)])[0]


def _scaled(curve: Curve, factor: float) -> Curve:
    return tuple((amount, seconds * factor) for amount, seconds in curve)


def _gap_s(heard: Heard) -> float:
    return statistics.median(heard.gaps_s)

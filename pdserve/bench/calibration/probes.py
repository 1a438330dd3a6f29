"""Requests whose times at the client are the times of rounds.

Prompts that come while another is computed share the next round: between the first tokens lies that round and nothing
of the way there and back. What a lone request takes beside its rounds is the way (`front_s`).

Of what is asked several times the fastest counts: a virtual machine is slow for seconds at a time, and never too fast.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdserve.bench.calibration.fit import Observation
from pdserve.bench.calibration.plan import CalibrationPlan, DecodeBatch, decode_parts, group_parts, prompt_parts
from pdserve.bench.deployed import Deployed
from pdserve.bench.listening import Call, Heard, unique_prompt
from pdserve.bench.policy_runs import Model
from pdserve.errors import InternalError

# A prompt long enough to be still in its round when those that were sent after it have arrived.
BLOCKER = 320
AFTER_S = 0.06


@dataclass(slots=True)
class Prober:
    """Asks one deployment. Every prompt is unlike all others, but for those of a decode batch and their repeats."""

    node: Deployed
    model: Model
    num_asked: int = 0

    def prefills(self, plan: CalibrationPlan, lengths: Sequence[int]) -> Iterator[Observation]:
        """Lone prompts, with the way there and back."""
        for length in lengths:
            parts = prompt_parts(length, self.node.chunk, plan.prefill_points)
            times_s = [self._lone(length) for _ in range(plan.times(length))]
            yield Observation(f"prompt of {length}", min(times_s), {**parts, "front_s": 1.0})

    def groups(self, plan: CalibrationPlan) -> Iterator[Observation]:
        for num_prompts, length in plan.groups:
            times_s = [self._group(num_prompts, length) for _ in range(plan.repeats)]
            what = f"{num_prompts} prompts of {length}"
            yield Observation(what, min(times_s), group_parts(num_prompts, length, plan.prefill_points))

    def decodes(self, plan: CalibrationPlan) -> Iterator[tuple[Observation, list[float]]]:
        """Each batch's round, and all its gaps."""
        for batch in plan.batches:
            gaps_s, context = self._decode(batch, plan.num_gaps)
            what = f"{batch.rows} rows after {batch.prompt}"
            yield Observation(what, statistics.median(gaps_s), decode_parts(batch.rows, context)), gaps_s

    def handoffs(self, plan: CalibrationPlan) -> Iterator[Heard]:
        """Two tokens each: between them lies the KV's way."""
        for length in plan.handed_over:
            for _ in range(plan.repeats):
                yield self.node.hear_all([Call(length, self._prompt(length), 2)])[0]

    def _prompt(self, length: int) -> tuple[int, ...]:
        self.num_asked += 1
        return unique_prompt(self.model.text, length, f"calibration {self.num_asked}")

    def _lone(self, length: int) -> float:
        (heard,) = self.node.hear_all([Call(0, self._prompt(length), 1)])
        return heard.ttft_s

    def _group(self, num_prompts: int, length: int) -> float:
        """From the blocker's first token to the last of theirs."""
        calls = [Call(0, self._prompt(BLOCKER), 1)]
        calls += [Call(number + 1, self._prompt(length), 1, AFTER_S) for number in range(num_prompts)]
        blocker, *others = self.node.hear_all(calls)
        return max(heard.arrivals_s[0] for heard in others) - blocker.arrivals_s[0]

    def _decode(self, batch: DecodeBatch, num_gaps: int) -> tuple[list[float], float]:
        """Gaps of one stream while all run, and the mean context of a row meanwhile.

        The prompts' whole blocks are asked for first, so that all streams begin at about the same time.
        """
        prompts = [
            unique_prompt(self.model.text, batch.prompt, f"decode {batch.prompt} {row}") for row in range(batch.rows)
        ]
        self.node.hear_all([Call(number, prompt, 2) for number, prompt in enumerate(prompts)])
        num_tokens = num_gaps + batch.rows + 2
        heard = self.node.hear_all([Call(number, prompt, num_tokens) for number, prompt in enumerate(prompts)])
        return steady_gaps(heard, batch.prompt)


def steady_gaps(heard: Sequence[Heard], prompt: int) -> tuple[list[float], float]:
    """Gaps of the stream with most of them, all while every one of `heard` decodes; and a row's mean context meanwhile.

    Raises InternalError where there are none.
    """
    begin_s = max(answer.arrivals_s[1] for answer in heard)
    end_s = min(answer.arrivals_s[-1] for answer in heard)
    gaps_s: list[float] = []
    for answer in heard:
        times_s = [at_s for at_s in answer.arrivals_s if begin_s <= at_s <= end_s]
        found_s = [after - before for before, after in itertools.pairwise(times_s)]
        gaps_s = max(gaps_s, found_s, key=len)
    if not gaps_s:
        raise InternalError(f"{len(heard)} streams never decoded side by side: the machine is too slow or too busy")
    middle_s = (begin_s + end_s) / 2
    num_so_far = [sum(at_s <= middle_s for at_s in answer.arrivals_s) for answer in heard]
    return gaps_s, prompt + statistics.mean(num_so_far)

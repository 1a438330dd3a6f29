"""Every case on real nodes, heard by a client in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.asking import TIMEOUT_S
from pdserve.bench.deployed import Deployed, fused, pair
from pdserve.bench.interference.cases import ALONE, POLICIES, SPLIT, SPLIT_ALONE, UNSET, Case, Experiment
from pdserve.bench.interference.chunks import ChunkShape
from pdserve.bench.listening import Call, Heard, hear, unique_prompt
from pdserve.bench.policy_runs import Model
from pdserve.client import AsyncClient
from pdserve.errors import StartupError
from pdserve.model.progress import Progress

VICTIM, ATTACKER, SHORTER = 0, 1, 2
# On two nodes the victim is heard until the attacker's answer has ended: what comes last, its KV, counts too. This is
# only the length of the answer that is asked for.
MAX_STREAMED = 4096


@dataclass(frozen=True, slots=True)
class Row:
    """What was heard in one case. attacker: None where the victim was alone."""

    case: Case
    victim: Heard
    attacker: Heard | None = None

    @property
    def worst_gap_meanwhile_s(self) -> float:
        """The victim's, up to the attacker's first token: what prefill and the KV's way cost it.

        What comes after is the price of one more stream with a long context in each decode round.
        """
        gaps_s, ends_s = self.victim.gaps_s, self.victim.arrivals_s[1:]
        until_s = self.attacker.arrivals_s[0] if self.attacker is not None else ends_s[-1]
        return max(gap_s for gap_s, end_s in zip(gaps_s, ends_s, strict=True) if end_s <= until_s)


@dataclass(frozen=True, slots=True)
class Served:
    """All rows, and the chunks' times on the fused node.

    walls_s: the victim's, (no policy, with the first policy), one pair after the other. split_worst_gaps_s: the
    victim's worst gap on two nodes, (alone, until the attacker's first token). A machine's speed drifts by more than
    what these are compared for, so that each pair is of neighbouring minutes, and there are several.
    """

    rows: list[Row]
    shape: ChunkShape
    walls_s: list[tuple[float, float]]
    split_worst_gaps_s: list[tuple[float, float]]


def serve_all(
    model: Model,
    experiment: Experiment,
    progress: Progress,
    policies: Sequence[Case] = POLICIES,
    repeats: int = 1,
) -> Served:
    """Every case on nodes of its own, the compared ones `repeats` times; nothing else should run on the machine."""
    num_steps = len(policies) + repeats + 1
    first, others = policies[0], policies[1:]
    progress("serving", 0, num_steps)
    with fused(model, **experiment.settings) as node, fused(model, **experiment.settings, **first.settings) as paced:
        alone = overhear(node, model, experiment, ALONE)
        (shorter,) = node.hear_all([_prompt(model, SHORTER, experiment.attacker_prompt // 2, 1)])
        compared = _in_turns(model, experiment, [(node, UNSET), (paced, first)], repeats)
    rows = [alone, *compared[0]]
    for step, case in enumerate(others, 2):
        progress("serving", step, num_steps)
        with fused(model, **experiment.settings, **case.settings) as node:
            rows.append(overhear(node, model, experiment, case))
    with pair(model, **experiment.settings) as node:
        split = []
        for repeat in range(repeats):
            progress("serving", num_steps - repeats + repeat, num_steps)
            beside = overhear(node, model, experiment, SPLIT, repeat=repeat)
            num_streamed = len(beside.victim.token_ids)
            split.append((overhear(node, model, experiment, SPLIT_ALONE, num_streamed, repeat), beside))
    progress("serving", num_steps, num_steps)
    return Served(
        [*rows, *split[0]],
        _shape(experiment, shorter, rows[1]),
        [(unset.victim.wall_s, paced_row.victim.wall_s) for unset, paced_row in compared],
        [(one.worst_gap_meanwhile_s, other.worst_gap_meanwhile_s) for one, other in split],
    )


def _in_turns(
    model: Model, experiment: Experiment, nodes: Sequence[tuple[Deployed, Case]], repeats: int
) -> list[list[Row]]:
    """Each repetition's rows, a row a node, one after the other."""
    return [
        [overhear(node, model, experiment, case, repeat=repeat) for node, case in nodes] for repeat in range(repeats)
    ]


def _shape(experiment: Experiment, shorter: Heard, unset: Row) -> ChunkShape:
    """From half of the prompt alone, and all of it where no decode round comes between its chunks."""
    assert unset.attacker is not None
    half = experiment.attacker_prompt // 2 // experiment.chunk
    return ChunkShape.of(half, shorter.ttft_s, experiment.num_chunks, unset.attacker.ttft_s)


def overhear(
    node: Deployed,
    model: Model,
    experiment: Experiment,
    case: Case,
    num_streamed: int | None = None,
    repeat: int = 0,
) -> Row:
    """The victim, and the attacker once the victim is under way. Another repeat has other prompts: none is cached."""
    victim = _prompt(model, VICTIM, experiment.victim_prompt, num_streamed or experiment.num_streamed, repeat)
    if not case.has_attacker:
        return Row(case, node.hear_all([victim])[0])
    attacker = _prompt(model, ATTACKER, experiment.attacker_prompt, experiment.num_asked, repeat)
    if case.is_split:
        victim = _prompt(model, VICTIM, experiment.victim_prompt, _longest(experiment), repeat)
    heard = asyncio.run(_overhear(node.address, experiment, victim, attacker, case.is_split))
    return Row(case, *heard)


def _longest(experiment: Experiment) -> int:
    """An answer that ends by being given up, in what the attacker leaves of the pool."""
    blocks = experiment.num_kv_blocks - experiment.attacker_prompt // experiment.block_size - 2
    return min(MAX_STREAMED, blocks * experiment.block_size - experiment.victim_prompt)


async def _overhear(
    address: str, experiment: Experiment, victim: Call, attacker: Call, to_its_end: bool
) -> tuple[Heard, Heard]:
    """to_its_end: hear the victim for as long as the attacker's answer takes, and no longer."""
    is_under_way = asyncio.Event()

    def is_enough(num_tokens: int) -> bool:
        if num_tokens >= experiment.num_before:
            is_under_way.set()
        return to_its_end and attack.done() and num_tokens >= experiment.num_streamed

    async def attack_later(client: AsyncClient) -> Heard:
        await is_under_way.wait()
        return await hear(client, attacker)

    async with AsyncClient(address, timeout_s=TIMEOUT_S, max_attempts=1) as client, asyncio.TaskGroup() as group:
        await client.server_info()
        attack = group.create_task(attack_later(client))
        heard = await hear(client, victim, is_enough)
    if to_its_end and len(heard.token_ids) == victim.num_output_tokens:
        raise StartupError(f"the victim's {victim.num_output_tokens} tokens ended before the attack: use fewer chunks")
    return heard, attack.result()


def _prompt(model: Model, number: int, num_tokens: int, num_output_tokens: int, repeat: int = 0) -> Call:
    seed = f"interference {number} {repeat}"
    return Call(number, unique_prompt(model.text, num_tokens, seed), num_output_tokens)

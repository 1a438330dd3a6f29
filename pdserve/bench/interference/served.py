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


@dataclass(frozen=True, slots=True)
class Served:
    """All rows, and the chunks' times on the fused node."""

    rows: list[Row]
    shape: ChunkShape


def serve_all(model: Model, experiment: Experiment, progress: Progress, policies: Sequence[Case] = POLICIES) -> Served:
    """Every case after the other, on nodes of their own; nothing else should run on the machine."""
    num_steps = len(policies) + 2
    progress("serving", 0, num_steps)
    with fused(model, **experiment.settings) as node:
        rows = [overhear(node, model, experiment, ALONE)]
        (shorter,) = node.hear_all([_prompt(model, SHORTER, experiment.attacker_prompt // 2, 1)])
        rows.append(overhear(node, model, experiment, UNSET))
    for step, case in enumerate(policies, 1):
        progress("serving", step, num_steps)
        with fused(model, **experiment.settings, **case.settings) as node:
            rows.append(overhear(node, model, experiment, case))
    progress("serving", num_steps - 1, num_steps)
    with pair(model, **experiment.settings) as node:
        split = overhear(node, model, experiment, SPLIT)
        alone = overhear(node, model, experiment, SPLIT_ALONE, len(split.victim.token_ids))
    progress("serving", num_steps, num_steps)
    return Served([*rows, alone, split], _shape(experiment, shorter, rows[1]))


def _shape(experiment: Experiment, shorter: Heard, unset: Row) -> ChunkShape:
    """From half of the prompt alone, and all of it where no decode round comes between its chunks."""
    assert unset.attacker is not None
    half = experiment.attacker_prompt // 2 // experiment.chunk
    return ChunkShape.of(half, shorter.ttft_s, experiment.num_chunks, unset.attacker.ttft_s)


def overhear(node: Deployed, model: Model, experiment: Experiment, case: Case, num_streamed: int | None = None) -> Row:
    """The victim, and the attacker once the victim is under way."""
    victim = _prompt(model, VICTIM, experiment.victim_prompt, num_streamed or experiment.num_streamed)
    if not case.has_attacker:
        return Row(case, node.hear_all([victim])[0])
    attacker = _prompt(model, ATTACKER, experiment.attacker_prompt, experiment.num_asked)
    if case.is_split:
        victim = _prompt(model, VICTIM, experiment.victim_prompt, _longest(experiment))
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


def _prompt(model: Model, number: int, num_tokens: int, num_output_tokens: int) -> Call:
    return Call(number, unique_prompt(model.text, num_tokens, f"interference {number}"), num_output_tokens)

"""Block files that somebody damages, and writers that are killed: the answers stay those of a node without files."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from pdserve.bench.asking import Reply, Verdict, ask_all, verdicts
from pdserve.bench.policy_runs import PATIENCE_S, FusedNode, Model, Outcome, equality_checks, fused_node
from pdserve.bench.processes import children
from pdserve.bench.stream_checks import Check, exactly
from pdserve.bench.workload import Ask
from pdserve.errors import InternalError

NUM_CORRUPTIONS = 200
NUM_KILLS = 3
BLOCK_SIZE = 16
# Prompts of four whole blocks and a little, of which the device holds five and host memory two.
NUM_PROMPTS = 16
NUM_PROMPT_TOKENS = 4 * BLOCK_SIZE + 3
NUM_NEW = 4
NUM_DEVICE_BLOCKS, NUM_HOST_BLOCKS = 28, 8


def measure_corruption(model: Model) -> Outcome:
    random = Random(6)
    asks = model.asks([NUM_PROMPT_TOKENS] * NUM_PROMPTS, NUM_NEW, random)
    with TemporaryDirectory() as folder:
        directory = Path(folder)
        references = _references(model, asks)
        damage, damaged, judged = _ask_damaged(model, directory, asks, references, random)
        num_left, killed, judged_after = _ask_killed(model, directory, asks, references)
    both = judged + judged_after
    return Outcome(
        f"{NUM_CORRUPTIONS} corruptions of block files, {NUM_KILLS} kills while files are written",
        {
            "corruptions": {**damage, **_figures(damaged, judged)},
            "kills": {"left_half_written": num_left, **_figures(killed, judged_after)},
        },
        [
            *equality_checks(dict(enumerate(both))),
            exactly("corruptions", sum(damage.values()), NUM_CORRUPTIONS),
            Check("damaged files that were read and refused", damaged["storage:corrupt"], 1, NUM_CORRUPTIONS * 2),
            Check("blocks read after kills", killed["storage:hits"], 1, math.inf),
        ],
    )


def _references(model: Model, asks: Sequence[Ask]) -> dict[int, Reply]:
    """Computed one at a time, as they will be again, by a node that has no other tier."""
    with fused_node(model, block_size=BLOCK_SIZE, num_kv_blocks=4 * NUM_DEVICE_BLOCKS) as node:
        return asyncio.run(ask_all(node.address, asks, 1, with_logprobs=True))


def _settings(model: Model, directory: Path) -> dict[str, Any]:
    return {
        "block_size": BLOCK_SIZE,
        "num_kv_blocks": NUM_DEVICE_BLOCKS,
        "host_kv_gb": (NUM_HOST_BLOCKS + 0.5) * model.block_bytes(BLOCK_SIZE) / 1e9,
        "kv_dir": str(directory),
    }


def _ask(node: FusedNode, ask: Ask, references: Mapping[int, Reply]) -> Verdict:
    replies = asyncio.run(ask_all(node.address, [ask], 1))
    return verdicts(replies, references)[ask.number]


# ---------------------------------------------------------------- corruptions


def _ask_damaged(
    model: Model, directory: Path, asks: Sequence[Ask], references: Mapping[int, Reply], random: Random
) -> tuple[dict[str, int], Mapping[str, int], list[Verdict]]:
    """One corruption between any two requests: how many of each kind, the node's counters, and the verdicts."""
    damage: Counter[str] = Counter()
    with fused_node(model, **_settings(model, directory)) as node:
        judged = [_ask(node, ask, references) for ask in asks]
        _wait_for_files(directory)
        for _ in range(NUM_CORRUPTIONS):
            kind = random.choice(list(KINDS))
            KINDS[kind](sorted(directory.rglob("*.kv")), random)
            damage[kind] += 1
            judged.append(_ask(node, random.choice(asks), references))
        return dict(damage), node.until_quiet().counters, judged


def _wait_for_files(directory: Path) -> None:
    """Until there are some to damage."""
    deadline_s = time.monotonic() + PATIENCE_S
    while sum(1 for _ in directory.rglob("*.kv")) < NUM_DEVICE_BLOCKS:
        if time.monotonic() > deadline_s:
            raise InternalError(f"fewer than {NUM_DEVICE_BLOCKS} block files were written within {PATIENCE_S:g} s")
        time.sleep(0.1)


def _flip(files: Sequence[Path], random: Random) -> None:
    """One bit, anywhere."""
    path = random.choice(files)
    with path.open("r+b") as file:
        place = random.randrange(path.stat().st_size)
        file.seek(place)
        (byte,) = file.read(1)
        file.seek(place)
        file.write(bytes([byte ^ 1 << random.randrange(8)]))


def _truncate(files: Sequence[Path], random: Random) -> None:
    path = random.choice(files)
    os.truncate(path, random.randrange(path.stat().st_size))


def _swap(files: Sequence[Path], random: Random) -> None:
    """Two files take each other's name."""
    first, second = random.sample(files, 2)
    aside = first.with_suffix(".swap")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


KINDS: dict[str, Callable[[Sequence[Path], Random], None]] = {
    "bit_flips": _flip,
    "truncations": _truncate,
    "swaps": _swap,
}


# ---------------------------------------------------------------- kills


def _ask_killed(
    model: Model, directory: Path, asks: Sequence[Ask], references: Mapping[int, Reply]
) -> tuple[int, Mapping[str, int], list[Verdict]]:
    """Kill the rank while it writes, a few times over, then ask a new one for everything.

    How many files were left half written; the last node's counters, and its verdicts. Each life begins with the
    directory emptied, so that there is something to write.
    """
    num_left = 0
    for _ in range(NUM_KILLS):
        for path in directory.rglob("*.kv"):
            path.unlink()
        with fused_node(model, **_settings(model, directory)) as node:
            _kill_while_writing(node, asks)
        num_left += sum(1 for _ in directory.rglob("*.tmp"))
    with fused_node(model, **_settings(model, directory)) as node:
        judged = [_ask(node, ask, references) for ask in asks]
        return num_left, node.until_quiet().counters, judged


def _kill_while_writing(node: FusedNode, asks: Sequence[Ask]) -> None:
    """In the midst of requests whose blocks push others out to files, some of which are written by then."""
    (rank,) = children(node.process.pid)
    with node.client() as client:
        for ask in asks:
            client.generate(token_ids=ask.prompt, max_new_tokens=1, temperature=0.0)
            (load,) = client.loads()
            if load.counters["storage:stored"] > NUM_DEVICE_BLOCKS:
                break
    os.kill(rank, signal.SIGKILL)


def _figures(counters: Mapping[str, int], judged: Sequence[Verdict]) -> dict[str, float]:
    return {
        "requests": len(judged),
        "wrong_answers": judged.count(Verdict.DIFFERENT),
        "blocks_read": counters["storage:hits"],
        "blocks_missed": counters["storage:misses"],
        "files_refused": counters["storage:corrupt"],
        "files_written": counters["storage:stored"],
        "prompt_tokens_found": counters["prefix_hit_tokens"],
        "prompt_tokens_computed": counters["prompt_tokens_computed"],
    }

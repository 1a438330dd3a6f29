"""The time to the first token of one long prompt: cold, and with its prefix on the device, in host memory, in files."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from pdserve.bench.policy_runs import FusedNode, Model, Outcome, fused_node
from pdserve.bench.stream_checks import Check, exactly
from pdserve.commands.measured import MeasuredAnswer, measure

BLOCK_SIZE = 64
NUM_PREFIX_BLOCKS = 94
NUM_PROMPT_TOKENS = NUM_PREFIX_BLOCKS * BLOCK_SIZE + 1
NUM_NEW = 8
# Requests of a few tokens that reserve 1,024 for their answers take the whole pool, and compute next to nothing.
NUM_CROWD, CROWD_TOKENS = 6, 1024
BLOCKS_EACH = CROWD_TOKENS // BLOCK_SIZE + 1
NUM_DEVICE_BLOCKS = NUM_CROWD * BLOCKS_EACH
NUM_HOST_BLOCKS = 2 * NUM_DEVICE_BLOCKS


def measure_files(model: Model) -> Outcome:
    prompt = model.prompt(NUM_PROMPT_TOKENS, Random(9))
    answers: dict[str, MeasuredAnswer] = {}
    with TemporaryDirectory() as folder:
        settings = _settings(model, Path(folder))
        with fused_node(model, **settings) as node:
            answers["cold"] = _ask(node, prompt)
            node.wait_for("the prefix is written to files", lambda load: _is_kept(load.counters))
            answers["device"] = _ask(node, prompt)
            _crowd_out(node)
            answers["host"] = _ask(node, prompt)
            num_from_host = node.until_quiet().counters["host_hit_tokens"]
        with fused_node(model, **settings) as node:
            answers["files"] = _ask(node, prompt)
            num_from_files = node.until_quiet().counters["storage_blocks_fetched"]
    tokens = {answer.token_ids for answer in answers.values()}
    warm = ("device", "host", "files")
    return Outcome(
        f"the first token of a prompt of {NUM_PROMPT_TOKENS:,} tokens, by where its prefix is",
        {where: _figures(answer) for where, answer in answers.items()},
        [
            exactly("different answers", len(tokens), 1),
            exactly("tokens from host memory", num_from_host, NUM_PREFIX_BLOCKS * BLOCK_SIZE),
            exactly("blocks from files", num_from_files, NUM_PREFIX_BLOCKS),
            *(Check(f"TTFT warm from {where} / cold", _share(answers, where), 0.0, 0.5) for where in warm),
        ],
    )


def _share(answers: Mapping[str, MeasuredAnswer], where: str) -> float:
    return round(answers[where].ttft_s / answers["cold"].ttft_s, 3)


def _settings(model: Model, directory: Path) -> dict[str, Any]:
    return {
        "block_size": BLOCK_SIZE,
        "num_kv_blocks": NUM_DEVICE_BLOCKS,
        "max_num_seqs": NUM_CROWD,
        "host_kv_gb": NUM_HOST_BLOCKS * model.block_bytes(BLOCK_SIZE) / 1e9,
        "kv_dir": str(directory),
    }


def _ask(node: FusedNode, prompt: tuple[int, ...]) -> MeasuredAnswer:
    with node.client() as client:
        return measure(client.stream(token_ids=prompt, max_new_tokens=NUM_NEW, temperature=0.0), _ignore)


def _is_kept(counters: Mapping[str, int]) -> bool:
    return min(counters.get("host:write_back_blocks", 0), counters["storage:stored"]) >= NUM_PREFIX_BLOCKS


def _crowd_out(node: FusedNode) -> None:
    """Requests that hold every block at once, and are given up then."""
    with node.client() as client, ThreadPoolExecutor(NUM_CROWD) as threads:
        streams = [
            client.stream(token_ids=[number + 1], max_new_tokens=CROWD_TOKENS, temperature=0.0, ignore_eos=True)
            for number in range(NUM_CROWD)
        ]
        list(threads.map(next, streams))
        node.wait_for("the pool is full", lambda load: load.num_held_blocks == load.num_blocks)
        for stream in streams:
            stream.close()
    node.until_quiet()


def _figures(answer: MeasuredAnswer) -> dict[str, float]:
    return {"ttft_s": answer.ttft_s, "prompt_tokens_found": answer.usage.num_cached_tokens}


def _ignore(text: str) -> None:
    """Only the time and the tokens of these answers count."""

"""What the prefill gate is worth to a group: two ranks that decode, and prompts that come one by one.

    python -m pdserve.bench.groups [--model smollm2-moe] [--prompts 24] [--repeats 2] [--json FILE]

Experts are shared, so that each rank's prompt lengthens everybody's round. The same requests at the same moments go to
a node without a policy, one with the gate, one with the gate and the fill condition, and one with the local cadence.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from pdserve.bench.deployed import Deployed, fused
from pdserve.bench.listening import Call, Heard, unique_prompt
from pdserve.bench.policy_runs import Model
from pdserve.commands.tables import write_json
from pdserve.model import hub
from pdserve.model.progress import show_progress
from pdserve.node_process import interrupted_by_sigterm

NUM_RANKS = 2
STREAMS_A_RANK = 2
# Of the prompts that come while the streams go on: about a fifth of the rounds would carry one.
MEAN_GAP_S = 2.0
PROMPT_TOKENS = (100, 400)
ANSWER_TOKENS = 4
POLICIES: Mapping[str, Mapping[str, Any]] = {
    "no policy": {},
    "gate 4, 16": {"prefill_attempt_interval": 4, "prefill_any_attempt_interval": 16},
    "and fill": {
        "prefill_attempt_interval": 4,
        "prefill_any_attempt_interval": 16,
        "prefill_fill_tokens": "auto",
        "prefill_fill_max_holds": 30,
    },
    "cadence 1:4": {"prefill_decode_interval": 4},
}
SETTINGS: Mapping[str, Any] = {
    "data_parallel_size": NUM_RANKS,
    "num_threads": 1,
    "num_kv_blocks": 256,
    "max_num_seqs": 16,
    "max_model_len": 4096,
    "chunked_prefill_size": 256,
}


@dataclass(frozen=True, slots=True)
class Row:
    """One policy under the requests of one repetition. Times in seconds, as clients saw them.

    gaps: between the tokens of streams, while prompts came.
    """

    policy: str
    num_rounds: int
    num_prefill_rounds: int
    gap_p50_s: float
    gap_p99_s: float
    gap_max_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    output_tokens_per_s: float
    gather_us: float


def requests(model: Model, num_prompts: int, repeat: int) -> tuple[list[Call], list[Call]]:
    """The streams, pinned evenly, and the prompts, which come by a Poisson process to ranks in random order."""
    random = Random(f"groups {repeat}")
    arrivals_s = 3.0
    prompts = []
    for number in range(num_prompts):
        arrivals_s += random.expovariate(1 / MEAN_GAP_S)
        tokens = unique_prompt(model.text, random.randint(*PROMPT_TOKENS), f"groups {repeat} {number}")
        prompts.append(Call(100 + number, tokens, ANSWER_TOKENS, arrivals_s, random.randrange(NUM_RANKS)))
    # Longer than the prompts take to come; what is drawn after the last of them is not counted.
    num_tokens = round(arrivals_s * 12) + 100
    streams = [
        Call(number, unique_prompt(model.text, 24, f"stream {repeat} {number}"), num_tokens, 0.0, number % NUM_RANKS)
        for number in range(STREAMS_A_RANK * NUM_RANKS)
    ]
    return streams, prompts


def measure(node: Deployed, policy: str, streams: Sequence[Call], prompts: Sequence[Call]) -> Row:
    """All of them at once; the counters before and after."""
    before = node.loads()[0].counters
    heard = node.hear_all([*streams, *prompts])
    after = node.loads()[0].counters
    rounds = {name: after.get(name, 0) - before.get(name, 0) for name in after}
    return row_of(policy, heard[: len(streams)], heard[len(streams) :], rounds)


def row_of(policy: str, streams: Sequence[Heard], prompts: Sequence[Heard], rounds: Mapping[str, int]) -> Row:
    first_s = min(answer.called_s for answer in prompts)
    last_s = max(answer.arrivals_s[-1] for answer in prompts)
    gaps = sorted(
        gap_s
        for stream in streams
        for at_s, gap_s in zip(stream.arrivals_s[1:], stream.gaps_s, strict=True)
        if first_s <= at_s <= last_s
    )
    ttft = sorted(answer.ttft_s for answer in prompts)
    num_tokens = sum(first_s <= at_s <= last_s for answer in (*streams, *prompts) for at_s in answer.arrivals_s)
    num_rounds = rounds["group_rounds_total"]
    return Row(
        policy,
        num_rounds,
        rounds["group_prefill_rounds_total"],
        percentile(gaps, 0.5),
        percentile(gaps, 0.99),
        gaps[-1],
        percentile(ttft, 0.5),
        percentile(ttft, 0.99),
        num_tokens / (last_s - first_s),
        rounds["group_gather_microseconds_total"] / num_rounds,
    )


def percentile(ordered: Sequence[float], share: float) -> float:
    """The value that `share` of them do not exceed."""
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered)) - 1))]


def run(model: Model, num_prompts: int, repeats: int) -> list[Row]:
    """Every policy once a repetition, in turn, each with a node of its own."""
    rows = []
    for repeat in range(repeats):
        streams, prompts = requests(model, num_prompts, repeat)
        for policy, flags in POLICIES.items():
            with fused(model, **SETTINGS, **flags) as node:
                rows.append(measure(node, policy, streams, prompts))
    return rows


def show(rows: Sequence[Row], console: Console) -> None:
    """Medians of each policy's repetitions."""
    columns = ("rounds", "prefill", "ITL p50", "p99", "max", "TTFT p50", "p99", "tokens/s")
    table = Table("seconds", *columns, box=SIMPLE)
    for policy in POLICIES:
        mine = [row for row in rows if row.policy == policy]

        def median(name: str, mine: Sequence[Row] = mine) -> float:
            return float(statistics.median(getattr(row, name) for row in mine))

        times = ("gap_p50_s", "gap_p99_s", "gap_max_s", "ttft_p50_s", "ttft_p99_s")
        table.add_row(
            policy,
            f"{median('num_rounds'):.0f}",
            f"{median('num_prefill_rounds'):.0f}",
            *(f"{median(name):.2f}" for name in times),
            f"{median('output_tokens_per_s'):.1f}",
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-moe")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    console = Console(highlight=False, stderr=asked.json == "-")
    with interrupted_by_sigterm(), show_progress() as progress:
        model = Model.of(hub.resolve(asked.model, progress=progress))
        rows = run(model, asked.prompts, asked.repeats)
    show(rows, console)
    if asked.json:
        write_json(asked.json, {"model": asked.model, "rows": [row_json(row) for row in rows]})
    return 0


def row_json(row: Row) -> dict[str, Any]:
    return {name: getattr(row, name) for name in Row.__slots__}


if __name__ == "__main__":
    sys.exit(main())

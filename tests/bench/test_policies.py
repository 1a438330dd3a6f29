"""The parts of the policy measurements that need no node."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from rich.console import Console

from pdserve.bench.policies import print_outcome
from pdserve.bench.policy_corruption import KINDS
from pdserve.bench.policy_gate import NUM_SCATTERED, NUM_STREAMED, make_work
from pdserve.bench.policy_runs import Model, Outcome
from pdserve.bench.stream_checks import exactly

MODEL = Model(Path("nowhere"), tuple(range(500)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(5))
def test_each_corruption_changes_what_some_file_holds_and_adds_none(tmp_path: Path, kind: str, seed: int) -> None:
    random = Random(seed)
    before = {tmp_path / f"{name}.kv": random.randbytes(64) for name in "abc"}
    for path, content in before.items():
        path.write_bytes(content)
    KINDS[kind](sorted(before), random)
    after = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert after.keys() == before.keys()
    num_changed = sum(after[path] != before[path] for path in before)
    assert num_changed == (2 if kind == "swaps" else 1)


def test_a_prompt_is_a_piece_of_the_text_that_starts_over_at_its_end() -> None:
    prompt = MODEL.prompt(1200, Random(1))
    assert len(prompt) == 1200
    assert all(after == (before + 1) % 500 for before, after in pairwise(prompt))


def test_scattered_prompts_all_come_while_the_first_stream_runs() -> None:
    work = make_work(MODEL)
    moments = [moment for moment, _ in work.scattered]
    assert moments == sorted(moments)
    assert len(moments) == NUM_SCATTERED
    assert moments[-1] < NUM_STREAMED
    numbers = [ask.number for ask in work.streams] + [ask.number for _, ask in work.scattered]
    assert numbers == list(range(len(numbers)))


def test_a_table_has_a_column_a_case_and_says_which_check_failed() -> None:
    console = Console(record=True, width=100)
    cases = {"off": {"prefill_rounds": 36, "wall_s": 1.5}, "on": {"prefill_rounds": 26}}
    print_outcome(Outcome("the gate", cases, [exactly("answers that differ", 1, 0), exactly("ties", 0, 0)]), console)
    lines = [line.split() for line in console.export_text().splitlines()]
    assert ["prefill", "rounds", "36", "26"] in lines
    assert ["wall", "s", "1.50", "–"] in lines
    assert ["answers", "that", "differ", "1", "0", "FAILED"] in lines
    assert ["ties", "0", "0", "ok"] in lines

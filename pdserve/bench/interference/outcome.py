"""What the rows come to: figures under stable names with units, and what has to hold."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from pdserve.bench.interference.cases import Case, Experiment
from pdserve.bench.interference.chunks import ChunkShape, chunks_in_gaps, num_long, num_whole_runs
from pdserve.bench.interference.served import Row, Served
from pdserve.bench.stream_checks import Check, exactly

WALL_TOLERANCE = 0.03
SPLIT_TOLERANCE = 0.20

Figures = dict[str, float]


def figures(row: Row, experiment: Experiment, decode_s: float, shape: ChunkShape) -> Figures:
    """Of one row, real or simulated. decode_s: the victim's gap when it is alone.

    long_gaps, whole_runs: see chunks.py; left out where the victim's answer ended before the attacker's prompt.
    """
    gaps_s = row.victim.gaps_s
    found: Figures = {
        "worst_gap_s": max(gaps_s),
        "gap_p50_s": statistics.median(gaps_s),
        "victim_wall_s": row.victim.wall_s,
        "victim_tokens": len(row.victim.arrivals_s),
    }
    if row.attacker is None:
        return found
    found["attacker_ttft_s"] = row.attacker.ttft_s
    if row.case.is_split:  # the chunks are computed elsewhere: no gap holds any
        return found
    chunks = chunks_in_gaps(row.victim, row.attacker, experiment.num_chunks, decode_s, shape)
    if chunks is not None:
        found["long_gaps"] = num_long(chunks)
        if row.case.every is not None:
            found["whole_runs"] = num_whole_runs(chunks, row.case.every)
    return found


def all_figures(rows: Sequence[Row], experiment: Experiment, shape: ChunkShape) -> dict[str, Figures]:
    """By the case's name."""
    decode_s = statistics.median(rows[0].victim.gaps_s)
    return {row.case.name: figures(row, experiment, decode_s, shape) for row in rows}


def count_checks(rows: Sequence[Row], found: Mapping[str, Figures], experiment: Experiment) -> list[Check]:
    """What holds on a machine of any speed."""
    checks = [exactly("streams with other tokens than the victim alone", num_different(rows), 0)]
    if "long_gaps" in found["unset"]:
        checks.append(exactly("long gaps where nothing is set", found["unset"]["long_gaps"], 1))
    for row in rows:
        if row.case.every is not None and "whole_runs" in found[row.case.name]:
            checks += _run_checks(row.case, row.case.every, found[row.case.name], experiment)
    return checks


def _run_checks(case: Case, every: int, found: Figures, experiment: Experiment) -> list[Check]:
    """Where half of 8 chunks is far from what any gap holds. At 4 a drift of a few per cent moves a gap across."""
    runs = experiment.runs(every)
    checks = []
    if every >= 8:
        checks.append(exactly(f"whole runs at {every}", found["whole_runs"], num_whole_runs(runs, every)))
    if every == 8:
        checks.append(exactly("long gaps at 8", found["long_gaps"], num_long(runs)))
    return checks


def time_checks(served: Served) -> list[Check]:
    """What holds where nothing else runs: medians of neighbouring pairs."""
    wall = _median_ratio(served.walls_s)
    worst = _median_ratio(served.split_worst_gaps_s)
    return [
        Check("wall at 8 / unset", round(wall, 3), 1 - WALL_TOLERANCE, 1 + WALL_TOLERANCE),
        Check(
            "prefill + decode node: worst gap until the prompt's first token / alone",
            round(worst, 3),
            None,
            1 + SPLIT_TOLERANCE,
        ),
    ]


def _median_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(second / first for first, second in pairs)


def num_different(rows: Sequence[Row]) -> int:
    """Rows whose victim got other tokens than alone, as far as both go."""
    alone = rows[0].victim.token_ids
    return sum(row.victim.token_ids[: len(alone)] != alone[: len(row.victim.token_ids)] for row in rows)

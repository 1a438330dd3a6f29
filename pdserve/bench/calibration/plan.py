"""What is asked of each node, and what its rounds are made of. Sizes that take some two minutes a deployment."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

# Coefficients of costs.RankCosts by name, and how often a round pays each.
Parts = dict[str, float]
# Whole blocks and a few tokens: prompts that are asked again cost one short round on every kind of node.
SHORT, MIDDLE, LONG, LONGEST = 70, 390, 1606, 4038
# Of these the decode curve is made. Kernels change between 3 and 4, and between 15 and 16.
ROWS = (1, 2, 3, 4, 6, 8, 12, 15, 16, 24, 32)
DECODE_CURVE, PREFILL_CURVE = "decode_rows_", "prefill_tokens_"


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """`rows` streams side by side, each after a prompt of that many tokens."""

    rows: int
    prompt: int


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """lengths: of prompts that come alone, in chunks where they are longer than one; the prefill curve's points are
    those up to a chunk. groups: prompts of one round.

    chunk, other_chunk: --chunked-prefill-size of the nodes that are started. num_gaps: of each decode batch, and in
    each of num_passes over all batches.
    handed_over: lengths of prompts whose KV travels whole after the first token.
    """

    lengths: tuple[int, ...] = (4, 16, 64, 128, 256, 512, 1024, 2048, 4096)
    groups: tuple[tuple[int, int], ...] = ((4, 16), (4, 64), (2, 192), (8, 60), (16, 28))
    other_lengths: tuple[int, ...] = (256, 1024, 2048)
    batches: tuple[DecodeBatch, ...] = (
        *(DecodeBatch(rows, SHORT) for rows in ROWS),
        *(DecodeBatch(rows, MIDDLE) for rows in (1, 4, 12)),
        *(DecodeBatch(rows, LONG) for rows in (1, 4)),
        DecodeBatch(1, LONGEST),
        DecodeBatch(2, LONGEST),
    )
    handed_over: tuple[int, ...] = (60, 250, 500)
    chunk: int = 512
    other_chunk: int = 128
    num_gaps: int = 20
    num_passes: int = 2
    repeats: int = 3
    # A longer prompt is asked this often.
    long_repeats: int = 1
    long_from: int = 1024
    num_kv_blocks: int = 400
    max_num_seqs: int = 32

    @property
    def settings(self) -> dict[str, int]:
        """Of every node."""
        return {"num_kv_blocks": self.num_kv_blocks, "max_num_seqs": self.max_num_seqs}

    @property
    def prefill_points(self) -> tuple[int, ...]:
        """Tokens of a round, ascending, that the prefill curve has a point for."""
        return tuple(sorted(length for length in self.lengths if length <= self.chunk))

    def times(self, length: int) -> int:
        """How often a prompt of this length is asked."""
        return self.long_repeats if length >= self.long_from else self.repeats


# On one thread everything takes twice as long, and the shape is known.
ONE_THREAD = CalibrationPlan(
    lengths=(4, 16, 64, 128, 256, 512, 1024, 2048),
    groups=((4, 64), (8, 60)),
    other_lengths=(),
    batches=(
        *(DecodeBatch(rows, SHORT) for rows in ROWS),
        DecodeBatch(1, MIDDLE),
        DecodeBatch(6, MIDDLE),
        DecodeBatch(1, LONG),
        DecodeBatch(2, LONGEST),
    ),
    repeats=2,
)


def prompt_parts(length: int, chunk: int, points: Sequence[int]) -> Parts:
    """What a prompt costs in rounds of its own."""
    parts = {"prefill_token_context_s": length * length / 2}
    for num_tokens, num_rounds in ((chunk, length // chunk), (length % chunk, 1)):
        if num_tokens and num_rounds:
            for name, share in _tokens_parts(num_tokens, points).items():
                parts[name] = parts.get(name, 0.0) + share * num_rounds
    return parts


def group_parts(num_prompts: int, length: int, points: Sequence[int]) -> Parts:
    """What a round with that many whole prompts costs."""
    return {
        "prefill_token_context_s": num_prompts * length * length / 2,
        **_tokens_parts(num_prompts * length, points),
    }


def decode_parts(rows: int, mean_context: float) -> Parts:
    """What a decode round costs whose rows have that many tokens each, the one being computed included.

    Each number of rows has a coefficient of its own, a point of RankCosts.decode_curve.
    """
    return {f"{DECODE_CURVE}{rows}": 1.0, "decode_context_s": rows * mean_context}


def _tokens_parts(num_tokens: int, points: Sequence[int]) -> Parts:
    """A round of that many prompt tokens on the prefill curve: a share of each neighbour, as RankCosts reads it."""
    at = bisect_left(points, num_tokens)
    if at == len(points):
        return {f"{PREFILL_CURVE}{points[-1]}": num_tokens / points[-1]}
    if at == 0 or points[at] == num_tokens:
        return {f"{PREFILL_CURVE}{points[at]}": 1.0}
    low, high = points[at - 1 : at + 1]
    share = (num_tokens - low) / (high - low)
    return {f"{PREFILL_CURVE}{low}": 1.0 - share, f"{PREFILL_CURVE}{high}": share}

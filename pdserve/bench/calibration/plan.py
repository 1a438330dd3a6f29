"""What is asked of each node, and what its rounds are made of. Sizes that take some two minutes a deployment."""

from __future__ import annotations

from dataclasses import dataclass

# Coefficients of costs.RankCosts by name, and how often a round pays each.
Parts = dict[str, float]
# Whole blocks and a few tokens: prompts that are asked again cost one short round on every kind of node.
SHORT, MIDDLE, LONG, LONGEST = 70, 390, 1606, 4038
# Of these the decode curve is made. Kernels change between 3 and 4, and between 15 and 16.
ROWS = (1, 2, 3, 4, 6, 8, 12, 15, 16, 24, 32)
CURVE = "decode_rows_"


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """`rows` streams side by side, each after a prompt of that many tokens."""

    rows: int
    prompt: int


@dataclass(frozen=True, slots=True)
class CalibrationPlan:
    """lengths: of prompts that come alone, in chunks where they are longer than one. groups: prompts of one round.

    chunk, other_chunk: --chunked-prefill-size of the nodes that are started. num_gaps: of each decode batch.
    handed_over: lengths of prompts whose KV travels whole after the first token.
    """

    lengths: tuple[int, ...] = (16, 64, 128, 256, 512, 1024, 2048, 4096)
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

    def times(self, length: int) -> int:
        """How often a prompt of this length is asked."""
        return self.long_repeats if length >= self.long_from else self.repeats


# On one thread everything takes twice as long, and the shape is known.
ONE_THREAD = CalibrationPlan(
    lengths=(16, 64, 256, 512, 1024, 2048),
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


def prompt_parts(length: int, chunk: int) -> Parts:
    """What a prompt costs in rounds of its own."""
    return {
        "prefill_fixed_s": float(-(-length // chunk)),
        "prefill_token_s": float(length),
        "prefill_token_context_s": length * length / 2,
    }


def group_parts(num_prompts: int, length: int) -> Parts:
    """What a round with that many whole prompts costs."""
    return {
        "prefill_fixed_s": 1.0,
        "prefill_token_s": float(num_prompts * length),
        "prefill_token_context_s": num_prompts * length * length / 2,
    }


def decode_parts(rows: int, mean_context: float) -> Parts:
    """What a decode round costs whose rows have that many tokens each, the one being computed included.

    Each number of rows has a coefficient of its own, a point of RankCosts.decode_curve.
    """
    return {curve_point(rows): 1.0, "decode_context_s": rows * mean_context}


def curve_point(rows: int) -> str:
    """The coefficient's name."""
    return f"{CURVE}{rows}"

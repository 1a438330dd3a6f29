"""How many of a long prompt's chunks lie in each gap of the stream beside it, as far as a client can tell.

Late chunks attend to more and cost several times what early ones do: seconds alone don't tell a run of 8 early chunks
from the last 3. So gaps are measured in chunks: the time of n chunks grows as n * first + growth * n (n - 1) / 2, which
two prompts of different lengths give, and the prompt's own time, less the stream's rounds in it, is shared out by that.

A gap is *long* when it lasted as long as more than half of the 8 chunks at its place. Of 58 chunks with a decode after
every 8, seven gaps hold 8, and the last holds 2: seven are long. A *whole run* is three quarters of the cadence's n
chunks or more: with 16 the gaps hold 16, 16, 16 and 10, of which the last was cut off by the prompt's end.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.bench.listening import Heard

LONG_CHUNKS = 8 / 2
WHOLE_SHARE = 3 / 4


@dataclass(frozen=True, slots=True)
class ChunkShape:
    """first_s: of a prompt's first chunk. growth_s: by which each is longer than the one before."""

    first_s: float
    growth_s: float

    @classmethod
    def of(cls, num_short: int, short_s: float, num_long: int, long_s: float) -> ChunkShape:
        """From the times of two prompts, num_short and num_long > num_short chunks long."""
        short, long = short_s / num_short, long_s / num_long
        growth_s = max(0.0, 2 * (long - short) / (num_long - num_short))
        return cls(max(long - growth_s * (num_long - 1) / 2, 1e-9), growth_s)

    def seconds(self, num_chunks: float) -> float:
        """Of a prompt's first chunks, as a curve through the whole numbers."""
        return num_chunks * self.first_s + self.growth_s * num_chunks * (num_chunks - 1) / 2

    def chunks(self, elapsed_s: float) -> float:
        """How many first chunks take this long."""
        if self.growth_s == 0.0:
            return elapsed_s / self.first_s
        linear = self.first_s - self.growth_s / 2
        return (math.sqrt(linear * linear + 2 * self.growth_s * elapsed_s) - linear) / self.growth_s


def chunks_in_gaps(
    victim: Heard, attacker: Heard, num_chunks: int, decode_s: float, shape: ChunkShape
) -> list[float] | None:
    """Chunks in each gap of the victim that the attacker's prompt was in; they sum to num_chunks.

    decode_s: of a round that gave the victim a token. None where the victim's answer ended before the prompt did.
    """
    if victim.arrivals_s[-1] < attacker.arrivals_s[0]:
        return None
    times_s = [max(0.0, after - before - decode_s) for before, after in _gaps_beside(victim, attacker)]
    scale = shape.seconds(num_chunks) / max(sum(times_s), 1e-9)
    done = [0.0, *(shape.chunks(scale * elapsed_s) for elapsed_s in itertools.accumulate(times_s))]
    return [after - before for before, after in itertools.pairwise(done)]


def _gaps_beside(victim: Heard, attacker: Heard) -> list[tuple[float, float]]:
    gaps = itertools.pairwise(victim.arrivals_s)
    return [gap for gap in gaps if gap[1] > attacker.called_s and gap[0] < attacker.arrivals_s[0]]


def num_long(chunks: Sequence[float]) -> int:
    """Gaps as long as more than half of 8 chunks."""
    return sum(held > LONG_CHUNKS for held in chunks)


def num_whole_runs(chunks: Sequence[float], every: int) -> int:
    """Gaps that hold the `every` chunks that a cadence lets pass."""
    return sum(held >= WHOLE_SHARE * every for held in chunks)


def expected_runs(num_chunks: int, every: int) -> list[int]:
    """Chunks in each gap where one decode round follows every `every` chunks."""
    whole, rest = divmod(num_chunks, every)
    return [every] * whole + ([rest] if rest else [])

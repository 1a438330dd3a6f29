"""An answer as a caller sees it: its text as it comes, and when its tokens came."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from pdserve.client import Stream, Usage
from pdserve.errors import InternalError
from pdserve.request import FinishReason


@dataclass(frozen=True, slots=True)
class MeasuredAnswer:
    """One streamed answer. gaps_s: seconds between arrivals of tokens, the first left out (that is ttft_s).

    placement: where the prompt was prefilled and why, as the node says in its trailing metadata.
    """

    text: str
    token_ids: tuple[int, ...]
    finish: FinishReason
    usage: Usage
    placement: str
    ttft_s: float
    gaps_s: tuple[float, ...]

    @property
    def itl_p50_s(self) -> float | None:
        """Half of the gaps between tokens are shorter; None where there is no gap."""
        return statistics.median(self.gaps_s) if self.gaps_s else None

    @property
    def itl_max_s(self) -> float | None:
        return max(self.gaps_s, default=None)

    def figures(self) -> dict[str, object]:
        """Under the names that every command's JSON uses."""
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish.value,
            "num_prompt_tokens": self.usage.num_prompt_tokens,
            "num_completion_tokens": self.usage.num_completion_tokens,
            "num_cached_tokens": self.usage.num_cached_tokens,
            "prefill": self.placement,
            "ttft_s": self.ttft_s,
            "itl_p50_s": self.itl_p50_s,
            "itl_max_s": self.itl_max_s,
        }


def measure(
    stream: Stream, on_text: Callable[[str], None], clock: Callable[[], float] = time.monotonic
) -> MeasuredAnswer:
    """Reads a stream of one sample to its end; the time to its first token counts from this call.

    Raises what the stream raises, and InternalError where it stops without a finish reason.
    """
    started = clock()
    arrivals: list[float] = []
    text: list[str] = []
    token_ids: list[int] = []
    last = None
    for piece in stream:
        if piece.token_ids:
            arrivals.append(clock())
            token_ids += piece.token_ids
        if piece.text:
            text.append(piece.text)
            on_text(piece.text)
        last = piece
    if last is None or last.finish is None:
        raise InternalError("the answer stopped without its end")
    return MeasuredAnswer(
        text="".join(text),
        token_ids=tuple(token_ids),
        finish=last.finish,
        usage=last.usage,
        placement=", ".join(stream.placements),
        ttft_s=(arrivals[0] if arrivals else clock()) - started,
        gaps_s=tuple(after - before for before, after in itertools.pairwise(arrivals)),
    )


def duration(seconds: float | None) -> str:
    """For a table: milliseconds below ten seconds; a dash where nothing was measured."""
    if seconds is None:
        return "–"
    return f"{seconds * 1e3:,.0f} ms" if seconds < 10 else f"{seconds:.1f} s"


def one_line(answer: MeasuredAnswer) -> str:
    """What a person wants to know of an answer, beneath it."""
    usage = answer.usage
    return (
        f"{usage.num_prompt_tokens} + {usage.num_completion_tokens} tokens, {answer.finish.value}; "
        f"prefill {answer.placement or 'not said'}; TTFT {duration(answer.ttft_s)}, "
        f"ITL p50 {duration(answer.itl_p50_s)}, max {duration(answer.itl_max_s)}"
    )

"""Recorded traffic: the request traces published with the Mooncake paper (FAST'25), and others of the same format.

One JSON object a line: timestamp (ms from the start), input_length and output_length (tokens), hash_ids (one for each
512 tokens of the prompt; equal ids = the same beginning). Lines are read as the clock comes to them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from pdserve.errors import StartupError
from pdserve.sim.lengths import MOST_TOKENS
from pdserve.sim.workload import SimRequest

PIECE_TOKENS = 512
KEYS = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace file as a workload. rate_scale: 2 = all arrivals twice as dense. limit: only the first so many."""

    path: Path
    rate_scale: float = 1.0
    limit: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.rate_scale) and self.rate_scale > 0):
            raise StartupError(f"--rate-scale {self.rate_scale:g} must be more than 0")
        if self.limit is not None and self.limit < 1:
            raise StartupError(f"--limit {self.limit} must be at least 1")

    def arrivals(self) -> Iterator[SimRequest]:
        """Raises StartupError, with the line's number, for what is no request of such a trace."""
        try:
            with self.path.open(encoding="utf-8") as lines:
                yield from self._requests(islice(lines, self.limit))
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", None) or error
            raise StartupError(f"the trace {self.path} can't be read ({why}); check the path") from None

    def after(self, request: SimRequest, now_s: float) -> SimRequest | None:
        return None

    def _requests(self, lines: Iterator[str]) -> Iterator[SimRequest]:
        last_ms, number = 0.0, -1
        for number, line in enumerate(lines):
            where = f"{self.path} line {number + 1}"
            found = _object(line, where)
            time_ms = found["timestamp"]
            if time_ms < last_ms:
                raise StartupError(f"{where}: timestamp {time_ms} is before {last_ms}; sort the lines by it")
            last_ms = time_ms
            yield SimRequest(
                number,
                time_ms / 1e3 / self.rate_scale,
                found["input_length"],
                found["output_length"],
                tuple(found["hash_ids"]),
                PIECE_TOKENS,
            )
        if number < 0:
            raise StartupError(f"the trace {self.path} is empty; a line is one request")


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{where} is no JSON ({error}); a trace has one object a line") from None
    if not isinstance(found, dict):
        raise StartupError(f"{where} is no object; a line has {', '.join(KEYS)}")
    if missing := [key for key in KEYS if key not in found]:
        raise StartupError(f"{where} lacks {', '.join(missing)}; a line has {', '.join(KEYS)}")
    if faults := [*_number_faults(found), *_hash_faults(found)]:
        raise StartupError(f"{where}: {'; '.join(faults)}")
    return found


def _number_faults(found: dict[str, Any]) -> Iterator[str]:
    time_ms = found["timestamp"]
    if type(time_ms) not in (int, float) or not math.isfinite(time_ms) or time_ms < 0:
        yield f"timestamp {time_ms!r} must be a number of milliseconds, 0 or more"
    for key in ("input_length", "output_length"):
        if type(found[key]) is not int or not 1 <= found[key] <= MOST_TOKENS:
            yield f"{key} {found[key]!r} must be a whole number from 1 to {MOST_TOKENS:,}"


def _hash_faults(found: dict[str, Any]) -> Iterator[str]:
    ids, length = found["hash_ids"], found["input_length"]
    if not isinstance(ids, list) or any(type(item) is not int or item < 0 for item in ids):
        yield "hash_ids must be a list of whole numbers, 0 or more"
    elif type(length) is int and length >= 1 and len(ids) != -(-length // PIECE_TOKENS):
        yield f"hash_ids has {len(ids)} for {length} tokens, one each {PIECE_TOKENS} makes {-(-length // PIECE_TOKENS)}"

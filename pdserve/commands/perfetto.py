"""Rounds in the Trace Event Format, which ui.perfetto.dev and chrome://tracing draw.

A node is a process, a rank a thread of it. A round is a complete event (ph X) with its plan, gather and forward inside,
an opening of the gate an instant (ph i). Times are microseconds since 1970.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from pdserve.commands.rounds import Noted
from pdserve.rounds import Round

Event = dict[str, Any]


def trace_of(rounds: Sequence[Noted], targets: Sequence[str]) -> dict[str, Any]:
    """The JSON object of the format. targets: of the nodes, by number."""
    events = [_named("process_name", node, 0, target) for node, target in enumerate(targets)]
    for node, rank in sorted({(one.node, one.rank) for one in rounds}):
        events.append(_named("thread_name", node, rank, f"rank {rank}"))
        of_rank = [one for one in rounds if (one.node, one.rank) == (node, rank)]
        of_rank.sort(key=lambda one: one.round.number)
        for one in of_rank:
            events += _slices(one)
        events += [_opening(after) for before, after in pairwise(of_rank) if _opens(before.round, after.round)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _place(node: int, rank: int) -> Event:
    """Numbers from 1 on: 0 is no process to some readers."""
    return {"pid": node + 1, "tid": rank + 1}


def _named(kind: str, node: int, rank: int, name: str) -> Event:
    return {"ph": "M", "name": kind, **_place(node, rank), "args": {"name": name}}


def _slices(one: Noted) -> Iterator[Event]:
    what = one.round

    def slice_of(name: str, after_us: int, elapsed_us: int, **more: Any) -> Event:
        times = {"ts": one.start_unix_us + after_us, "dur": elapsed_us}
        return {"ph": "X", "name": name, "cat": "round", **_place(one.node, one.rank), **times, **more}

    yield slice_of(_what_it_ran(what), 0, what.total_us, args=_arguments(what))
    yield slice_of("plan", 0, what.plan_us)
    if what.gather_us is not None:
        yield slice_of("gather", what.plan_us, what.gather_us)
    if what.forward_at_us is not None and what.forward_us is not None:
        yield slice_of("forward", what.forward_at_us, what.forward_us)


def _what_it_ran(what: Round) -> str:
    """Prefill tokens and decode rows."""
    parts = [f"prefill {what.num_prefill_tokens}"] * (what.num_prefill_rows > 0)
    parts += [f"decode {what.num_decode_rows}"] * (what.num_decode_rows > 0)
    return " + ".join(parts) or "idle"


def _arguments(what: Round) -> dict[str, Any]:
    values = {name: value for name, value in what._asdict().items() if value is not None}
    if what.decision is not None:
        values["decision"] = f"{'open' if what.decision.is_open else 'closed'}: {what.decision.value}"
    return values


def _opens(before: Round, after: Round) -> bool:
    """The gate was closed in the round just before."""
    if before.decision is None or after.decision is None or before.number + 1 != after.number:
        return False
    return after.decision.is_open and not before.decision.is_open


def _opening(one: Noted) -> Event:
    assert one.round.decision is not None
    name = f"gate opens: {one.round.decision.value}"
    return {"ph": "i", "s": "t", "name": name, "cat": "gate", **_place(one.node, one.rank), "ts": one.start_unix_us}

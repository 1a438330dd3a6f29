"""The timeline as a page that stands alone: its data, style and program are all in one file."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path

from pdserve.errors import StartupError
from pdserve.sim.observer import SimRound, Transferred
from pdserve.sim.timeline import Activity, RowKey, Timeline, activity

PAGE = Path(__file__).with_name("timeline.html")
ACTIVITIES = list(Activity)


def write(timeline: Timeline, path: str | Path) -> None:
    """Write the page."""
    try:
        Path(path).write_text(page(timeline), encoding="utf-8")
    except OSError as error:
        raise StartupError(f"{path} can't be written ({error.strerror}); check the path") from None


def page(timeline: Timeline) -> str:
    """The page's text. Nothing of the data can end the element that holds it."""
    data = json.dumps(figures(timeline), separators=(",", ":")).replace("</", "<\\/")
    text = PAGE.read_text(encoding="utf-8")
    return text.replace("@TITLE@", html.escape(timeline.title)).replace("@DATA@", data)


def figures(timeline: Timeline) -> dict[str, object]:
    """What the page draws: a column a number, as objects would take several times the space. Times in microseconds."""
    return {
        "title": timeline.title,
        "note": timeline.note,
        "activities": [kind.value for kind in ACTIVITIES],
        "end_us": _us(timeline.end_s),
        "rows": [_row(key, rounds) for key, rounds in timeline.rows().items()],
        "lanes": [_lane(lane) for lane in timeline.lanes()],
    }


def _row(key: RowKey, rounds: Sequence[SimRound]) -> dict[str, object]:
    return {
        "label": key.label,
        "activity": [ACTIVITIES.index(activity(r)) for r in rounds],
        "start_us": [_us(r.started_s) for r in rounds],
        "length_us": [_us(r.ends_s - r.started_s) for r in rounds],
        "busy_us": [_us(r.busy_s) for r in rounds],
        "prefill_rows": [r.num_prefill_rows for r in rounds],
        "prefill_tokens": [r.num_prefill_tokens for r in rounds],
        "decode_rows": [r.num_decode_rows for r in rounds],
        "is_held": [int(r.is_held) for r in rounds],
        "wants_prefill": [int(r.wants_prefill) for r in rounds],
        "held_blocks": [r.held_blocks for r in rounds],
    }


def _lane(lane: Sequence[Transferred]) -> dict[str, object]:
    return {
        "number": [t.number for t in lane],
        "start_us": [_us(t.started_s) for t in lane],
        "length_us": [_us(t.ended_s - t.started_s) for t in lane],
        "exposed_us": [_us(t.exposed_s) for t in lane],
        "num_bytes": [t.num_bytes for t in lane],
    }


def _us(seconds: float) -> int:
    return round(seconds * 1e6)

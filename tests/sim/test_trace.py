"""Traces. mooncake_excerpt.jsonl: the first 8 requests of conversation_trace.jsonl, published with the Mooncake paper
(FAST'25) in kvcache-ai/Mooncake under FAST25-release/traces, Apache-2.0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.errors import StartupError
from pdserve.sim.trace import Trace

EXCERPT = Path(__file__).parent / "mooncake_excerpt.jsonl"
LINE = {"timestamp": 10, "input_length": 600, "output_length": 3, "hash_ids": [4, 5]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.jsonl"


def refused(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    with pytest.raises(StartupError) as error:
        list(Trace(path).arrivals())
    return error.value.message


def test_lines_are_requests() -> None:
    requests = list(Trace(EXCERPT).arrivals())
    assert [request.number for request in requests] == list(range(8))
    first = requests[0]
    assert (first.arrival_s, first.num_prompt_tokens, first.num_output_tokens) == (0.0, 6758, 500)
    assert (first.hash_ids, first.hash_block_tokens) == (tuple(range(14)), 512)
    assert {request.hash_ids[0] for request in requests} == {0}  # they begin alike


def test_a_limit_and_a_scale_change_how_many_come_and_when(path: Path) -> None:
    path.write_text("".join(json.dumps({**LINE, "timestamp": 1000 * n}) + "\n" for n in range(5)))
    assert [request.arrival_s for request in Trace(path, rate_scale=4.0, limit=3).arrivals()] == [0.0, 0.25, 0.5]


def test_lines_are_read_as_they_are_needed(path: Path) -> None:
    """What is wrong further on, a clock that doesn't come so far never sees."""
    path.write_text(json.dumps(LINE) + "\nno JSON\n")
    arrivals: Iterator[object] = Trace(path).arrivals()
    next(arrivals)
    with pytest.raises(StartupError, match="line 2 is no JSON"):
        next(arrivals)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"timestamp": -1}, "timestamp -1 must be a number of milliseconds"),
        ({"timestamp": "soon"}, "timestamp 'soon' must be a number"),
        ({"timestamp": True}, "timestamp True must be a number"),
        ({"input_length": 0, "hash_ids": []}, "input_length 0 must be a whole number from 1 to 10,000,000"),
        ({"output_length": 10**9}, "output_length 1000000000 must be a whole number from 1 to 10,000,000"),
        ({"output_length": 1.5}, "output_length 1.5 must be a whole number"),
        ({"hash_ids": [4]}, "hash_ids has 1 for 600 tokens, one each 512 makes 2"),
        ({"hash_ids": ["a", "b"]}, "hash_ids must be a list of whole numbers"),
        ({"hash_ids": [-1, 2]}, "hash_ids must be a list of whole numbers, 0 or more"),
        ({"hash_ids": None}, "hash_ids must be a list"),
        ({"timestamp": 9}, "timestamp 9 is before 10; sort the lines"),
    ],
)
def test_a_wrong_line_is_told_with_its_number(change: dict[str, object], reason: str, path: Path) -> None:
    message = refused(path, LINE, {**LINE, **change})
    assert f"{path} line 2: " in message
    assert reason in message


def test_all_that_is_wrong_with_a_line_is_told_at_once(path: Path) -> None:
    message = refused(path, {**LINE, "timestamp": -1, "output_length": 0})
    assert "timestamp -1" in message
    assert "output_length 0" in message


@pytest.mark.parametrize(
    ("line", "reason"),
    [("[1]", "line 1 is no object"), ("", "line 1 is no JSON"), ('{"timestamp": 1}', "line 1 lacks input_length, out")],
)
def test_a_line_of_another_format_is_refused(line: str, reason: str, path: Path) -> None:
    assert reason in refused(path, line)


def test_a_trace_without_a_request_is_refused(path: Path) -> None:
    assert "is empty" in refused(path)


def test_a_trace_that_can_not_be_read_is_refused(path: Path) -> None:
    with pytest.raises(StartupError, match="can't be read"):
        list(Trace(path).arrivals())
    with pytest.raises(StartupError, match="--rate-scale 0"):
        Trace(path, rate_scale=0.0)
    with pytest.raises(StartupError, match="--limit 0"):
        Trace(path, limit=0)

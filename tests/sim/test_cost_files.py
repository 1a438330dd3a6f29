"""Cost files: read strictly, written so that they read the same, and the shipped ones say where they come from."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from pdserve.errors import StartupError
from pdserve.request import RequestId
from pdserve.scheduler.plan import Row
from pdserve.sim import cost_files
from pdserve.sim.cost_files import CostFile
from pdserve.sim.costs import RankCosts

SHIPPED = cost_files.shipped()
SOURCE_TOKENS, CHUNK = 200_019, 3456


def found(**changes: Any) -> dict[str, Any]:
    """A right file's object, with other values."""
    needed = (item.name for item in dataclasses.fields(RankCosts) if item.default is dataclasses.MISSING)
    rank = dict.fromkeys(needed, 0.001)
    return {
        "name": "mine",
        "source": "a test",
        "block_size": 16,
        "block_bytes": 1024,
        "fused": rank,
        "prefill": rank,
        "decode": rank,
        "handoff": {"latency_s": 0.001, "read_s": 0.0, "bytes_per_s": 1e9},
        "tiers": {"host_bytes_per_s": 1e9, "storage_bytes_per_s": 1e8, "storage_latency_s": 0.0},
        "front": {"arrival_s": 0.0, "delivery_s": 0.0},
        "noise": 0.1,
        "deployment": {"num_kv_blocks": 100, "chunked_prefill_size": 64},
        **changes,
    }


def refused(value: dict[str, Any]) -> str:
    with pytest.raises(StartupError) as error:
        cost_files.parse(value, "mine.json")
    return error.value.message


def test_a_file_gives_the_costs_and_the_deployment_they_are_of() -> None:
    read = cost_files.parse(found(fit={"worst_error": 0.2}))
    assert (read.costs.name, read.costs.fused.decode_row_s, read.costs.noise) == ("mine", 0.001, 0.1)
    assert (read.deployment.num_kv_blocks, read.deployment.chunked_prefill_size) == (100, 64)
    assert read.deployment.max_num_seqs == 32  # a node's default
    assert read.fit == {"worst_error": 0.2}


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_saved_reads_the_same(name: str, tmp_path: Path) -> None:
    read = cost_files.load(name)
    cost_files.save(read, tmp_path / "again.json")
    assert cost_files.load(tmp_path / "again.json") == read


def test_curves_are_read_and_written(tmp_path: Path) -> None:
    rank = {**found()["fused"], "decode_curve": [[1, 0.1], [4, 0.3]], "prefill_curve": [[16, 0.2]]}
    read = cost_files.parse(found(fused=rank))
    assert read.costs.fused.decode_curve == ((1, 0.1), (4, 0.3))
    assert read.costs.fused.prefill_curve == ((16, 0.2),)
    cost_files.save(read, tmp_path / "again.json")
    assert cost_files.load(tmp_path / "again.json") == read


@pytest.mark.parametrize(
    ("curve", "reason"),
    [
        (0.1, "must be a list of [amount, seconds]"),
        ([[1, 0.1, 2]], "must be a list of [amount, seconds]"),
        ([[4, 0.1], [4, 0.2]], "must have its amounts in ascending order"),
        ([[0, 0.1]], "must be a whole number from 1 to"),
        ([[1, -0.1]], "must not be negative"),
    ],
)
def test_a_decode_curve_that_is_none_is_refused(curve: object, reason: str) -> None:
    message = refused(found(fused={**found()["fused"], "decode_curve": curve}))
    assert "fused.decode_curve" in message
    assert reason in message


def test_a_fit_is_kept(tmp_path: Path) -> None:
    read = cost_files.parse(found())
    cost_files.save(CostFile(read.costs, read.deployment, {"p50_error": -0.1}), tmp_path / "again.json")
    assert cost_files.load(tmp_path / "again.json").fit == {"p50_error": -0.1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"noise": -0.1}, "noise -0.1 (from mine.json): must not be negative"),
        ({"noise": "much"}, 'noise "much" (from mine.json): must be a number'),
        ({"noise": True}, "noise true (from mine.json): must be a number"),
        ({"noise": float("nan")}, "noise NaN (from mine.json): must be a number"),
        ({"noise": 1e6}, "noise 1000000.0 (from mine.json): must be at most 3"),
        (
            {"front": {"arrival_s": 1e308, "delivery_s": 0}},
            "front.arrival_s 1e+308 (from mine.json): must be at most 1e+06",
        ),
        ({"block_size": 0}, "block_size 0 (from mine.json): must be a whole number from 1 to 1e+18"),
        ({"block_bytes": 1.5}, "block_bytes 1.5 (from mine.json): must be a whole number from 1 to 1e+18"),
        (
            {"block_bytes": 10**19},
            "block_bytes 10000000000000000000 (from mine.json): must be a whole number from 1 to 1e",
        ),
        ({"source": " "}, 'source " " (from mine.json): must be some words'),
        ({"front": 3}, "front 3 (from mine.json): must be an object"),
        ({"front": {"arrival_s": 0}}, "front.delivery_s (from mine.json): is missing"),
        ({"gpu": 1}, "gpu 1 (from mine.json): is not known here; known are name, source"),
        (
            {"handoff": {"latency_s": 0, "read_s": 0, "bytes_per_s": 0}},
            "handoff.bytes_per_s 0 (from mine.json): must be more than 0",
        ),
        ({"fit": {"p50": "good"}}, 'fit.p50 "good" (from mine.json): must be a number'),
        ({"deployment": {}}, "deployment.num_kv_blocks (from mine.json): is missing: a pool has to have a size"),
        ({"deployment": {"num_kv_blocks": 1, "speed": 2}}, "deployment.speed 2 (from mine.json): is no knob"),
        (
            {"deployment": {"num_kv_blocks": 0}},
            "--num-kv-blocks 0 (from mine.json): must be greater than or equal to 1",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_field_and_value(changes: dict[str, Any], reason: str) -> None:
    assert reason in refused(found(**changes))


def test_all_faults_are_told_at_once() -> None:
    value = found(noise=-1, block_size="16", deployment={"speed": 1})
    del value["tiers"]
    message = refused(value)
    assert message.startswith("5 settings are wrong:")
    for field in ("noise -1", 'block_size "16"', "tiers", "deployment.speed", "deployment.num_kv_blocks"):
        assert f"\n  {field}" in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is no JSON"),
        ("[]", "must hold one JSON object"),
        ("[" * 100_000, "is no JSON"),
        ('{"name": "a", "name": "b"}', "is no JSON: name is given twice"),
    ],
)
def test_what_is_no_cost_file_at_all_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(StartupError, match=reason):
        cost_files.load(path)


def test_a_name_nobody_ships_is_answered_with_those_that_are(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="seed-context, seed-flat"):
        cost_files.load(tmp_path / "nothing")
    with pytest.raises(StartupError, match="can't be written"):
        cost_files.save(cost_files.load("seed-flat"), tmp_path / "no" / "folder")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_files_are_named_as_their_costs_and_say_their_source(name: str) -> None:
    read = cost_files.load(name)
    assert read.costs.name == name
    assert len(read.costs.source) > 100
    assert read.deployment.topology()


def chunks() -> list[Row]:
    """The source's prompt in its 58 chunks."""
    starts = range(0, SOURCE_TOKENS, CHUNK)
    return [chunk(start, min(start + CHUNK, SOURCE_TOKENS)) for start in starts]


def chunk(start: int, end: int) -> Row:
    return Row(RequestId("attacker"), slot=0, start=start, end=end, new_blocks=(), samples=end == SOURCE_TOKENS)


def test_seed_context_is_the_curve_its_source_describes() -> None:
    costs = cost_files.load("seed-context").costs.fused
    seconds = [costs.prefill_s([row]) for row in chunks()]
    assert len(seconds) == 58
    assert sum(seconds) == pytest.approx(58 * 1.35)
    runs = [sum(seconds[start : start + 8]) for start in range(0, 56, 8)]
    assert max(runs) == pytest.approx(13.03)
    steps = [after - before for before, after in itertools.pairwise(seconds[:57])]  # the last is shorter
    assert steps == pytest.approx([steps[0]] * len(steps))  # a + b * i
    middle = chunk(100_009 - 192, 100_009 + 192)
    assert costs.prefill_s([middle]) == pytest.approx(0.388, rel=1e-4)


def test_seed_flat_costs_the_same_for_every_chunk() -> None:
    costs = cost_files.load("seed-flat").costs.fused
    assert {costs.prefill_s([row]) for row in chunks()} == {1.35}
    assert 1 / costs.decode_fixed_s == pytest.approx(59.4)

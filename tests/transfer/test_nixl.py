"""NIXL between real processes: bytes, a peer killed in the middle of a READ, and a peer that is stuck.

`tcp,self` is what two hosts do; by default one host copies between processes inside the post, where nothing can hang.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.transfer.base import CutPeer, PeerLost, ReadFailed
from pdserve.transfer.link import HandleState, NotPosted, Sighting
from pdserve.transfer.nixl import NixlHandle, NixlWire, _sight
from tests.transfer.conftest import PEER, Node, Pair, new_slab, nixl_node

NUM_READS = 16
over_both = pytest.mark.parametrize("tls", ["", "tcp,self"], ids=["default", "tcp"])


def run(scenario: str, tls: str) -> dict[str, Any]:
    environment = os.environ | ({"UCX_TLS": tls} if tls else {})
    ran = subprocess.run(
        [sys.executable, "-m", "tests.transfer.processes", scenario],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


@over_both
def test_every_byte_crosses_between_processes_and_the_source_survives(tls: str) -> None:
    assert run("whole", tls) == {"is_equal": True, "source_exit": 0}


@over_both
def test_a_peer_killed_in_the_middle_of_reads_is_lost_and_no_byte_lands_after(tls: str) -> None:
    result = run("killed", tls)
    told = Counter((kind, is_quiet) for kind, _, is_quiet in result["told"])
    assert told["PeerLost", None] == 1
    assert told["ReadDone", None] + told["ReadFailed", True] == NUM_READS + 1
    assert told["ReadFailed", False] == told["ReadQuiet", None]
    assert result["late"] == 0
    if tls:
        assert result["num_open"] == NUM_READS  # the kill did meet reads in flight


@over_both
def test_a_stuck_peer_that_is_cut_off_writes_no_byte_after(tls: str) -> None:
    result = run("cut", tls)
    told = Counter((kind, is_quiet) for kind, _, is_quiet in result["told"])
    assert told["PeerLost", None] == 1
    assert told["ReadDone", None] + told["ReadFailed", True] == NUM_READS
    assert result["late"] == 0
    if tls:
        assert told["ReadFailed", True] == result["num_open"] == NUM_READS


@over_both
def test_a_peer_that_never_answers_fails_the_connect_in_time(tls: str) -> None:
    assert run("unanswered", tls) == {"failed": ["no answer to the first read within 0.3 s"]}


def raising(error: Exception) -> Callable[[Any], str]:
    def look(_: Any) -> str:
        raise error

    return look


def test_only_a_disconnect_ends_a_handle_and_every_other_exception_leaves_it_in_doubt() -> None:
    from nixl_cu12 import _bindings as native

    names = [name for name in dir(native) if name.endswith("Error") and name != "nixlRemoteDisconnectError"]
    assert len(names) > 8
    for name in names:
        assert _sight(raising(getattr(native, name)("why")), None) == (HandleState.DOUBTFUL, f"{name}: why")
    disconnected = _sight(raising(native.nixlRemoteDisconnectError("why")), None)
    assert disconnected == (HandleState.DISCONNECTED, "the peer's transport disconnected")


@pytest.mark.parametrize(
    ("state", "sighting"),
    [
        ("DONE", Sighting(HandleState.DONE)),
        ("PROC", Sighting(HandleState.POSTED)),
        ("ERR", Sighting(HandleState.DOUBTFUL, "transfer state ERR")),
    ],
)
def test_states_mean_what_they_say(state: str, sighting: Sighting) -> None:
    assert _sight(lambda _: state, None) == sighting


@pytest.fixture
def pair() -> Pair:
    return Pair(nixl_node(new_slab(8, seed=1)), nixl_node(new_slab(8)))


def wire_of(node: Node) -> NixlWire:
    link = node.transport._links[PEER]  # type: ignore[attr-defined]
    assert isinstance(link.wire, NixlWire)
    return link.wire


def test_a_handle_that_cannot_be_made_is_said_to_be_not_posted(pair: Pair) -> None:
    pair.connect()
    with pytest.raises(NotPosted, match="no handle for 1 pieces: nixlInvalidParamError"):
        wire_of(pair.reader).post([99], [0])


def test_a_warm_up_that_cannot_be_made_is_said_to_be_not_posted(pair: Pair) -> None:
    pair.connect()
    wire = wire_of(pair.reader)
    wire._remote = "nobody"
    with pytest.raises(NotPosted, match="no handle for the first read: nixl"):
        wire.post_warm_up()


def test_a_cut_ends_the_agent_though_somebody_still_holds_a_handle(pair: Pair) -> None:
    pair.connect()
    kept: list[NixlHandle] = [wire_of(pair.reader).post([1], [2])[0]]
    pair.reader.transport.submit(CutPeer(PEER))
    pair.reader.poll()
    assert pair.reader.of(PeerLost)
    assert kept[0].native is None


def test_an_agent_that_outlives_its_cut_is_never_called_quiet(pair: Pair) -> None:
    pair.connect()
    kept = wire_of(pair.reader)._local
    with pytest.raises(AssertionError, match="outlived its peer"):
        pair.reader.transport.submit(CutPeer(PEER))
    assert kept is not None
    assert not pair.reader.of(ReadFailed)

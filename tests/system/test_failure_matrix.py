"""The failure matrix of the handoff (spec: failure matrix), row by row, with real processes and sockets.

client aborts in each phase                     here
P or D stopped, up to beyond the lease          here; many times: test_failure_matrix_soak
stale, forged reference                         here; every malformed message: roles/test_protocol
out-of-range reference                          roles/test_protocol (a P that lies), transfer/test_pull
no progress for the deadline                    here: P stopped, control channel held
control channel held, cut, truncated            here
data channel cut, control alive                 test_failure_matrix_partition; KV that never comes: roles/test_failures
another revision of the model                   here; block size: test_peers; other fields: roles/test_fallback
more requests than slots                        here; than P's pool: roles/test_limits
clocks that differ                              here
kill -9 of P idle, mid-READ; of D mid-READ      test_failure_matrix_kills; mid-prefill, decoding: test_peers
P stopped, D killed, P goes on                  test_failure_matrix_kills
failure at each message boundary                roles
random faults                                   pdserve bench chaos
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from pdserve.bench.control_proxy import ControlProxy
from pdserve.bench.tiny_model import QUICK, make_model
from pdserve.config import Role
from pdserve.errors import PeerMismatch, QueueFull
from pdserve.request import LeaseId
from pdserve.rpc.handoff import Accepted, Release, Released
from tests.roles.relay import DecodeByHand, decode_by_hand
from tests.system.conftest import MATRIX_TRANSPORTS, TRANSPORTS
from tests.system.control import Asking, stopped
from tests.system.matrix import (
    FAR,
    LEASE_S,
    NUM_NEW,
    NUM_QUEUED,
    NUM_SLOTS,
    SETTINGS,
    Watched,
    new_prompt,
    watched_pair,
)
from tests.system.nodes import CHUNK, PATIENCE_S, Node, Nodes, wait_for, wait_until_connected, wait_until_serving

pytestmark = pytest.mark.system


@pytest.fixture(scope="module", params=MATRIX_TRANSPORTS)
def watched(request: pytest.FixtureRequest, quick_nodes: Nodes) -> Iterator[Watched]:
    pair = watched_pair(quick_nodes, TRANSPORTS[request.param])
    yield pair
    pair.end()


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("kind", ["start", "accepted", "chunk_ready", "first_token", "released"])
def test_a_client_that_leaves_takes_everything_of_its_request_along(watched: Watched, kind: str) -> None:
    """Queued, mid-prefill, mid-READ, after the first token, decoding."""
    before = watched.control.count(kind)
    with watched.decode.client() as client:
        stream = client.stream(token_ids=new_prompt(), max_new_tokens=400, temperature=0.0, ignore_eos=True)
        watched.control.wait_for(kind, before)
        stream.close()
        watched.settle()
    assert watched.decode.process.is_serving()


def test_a_client_that_leaves_before_its_request_was_begun_is_never_heard_of_by_the_peer(watched: Watched) -> None:
    num_starts = watched.control.count("start")
    with watched.decode.client() as client:
        busy = [
            client.stream(token_ids=new_prompt(40), max_new_tokens=2000, temperature=0.0, ignore_eos=True)
            for _ in range(NUM_SLOTS)
        ]
        for stream in busy:
            next(stream)
        waiting = client.stream(token_ids=new_prompt(), max_new_tokens=NUM_NEW)
        wait_for(lambda: watched.decode.load().num_waiting == 1, lambda: watched.decode.log)
        waiting.close()
        wait_for(lambda: watched.decode.load().num_waiting == 0, lambda: watched.decode.log)
        for stream in busy:
            stream.close()
    watched.settle()
    assert watched.control.count("start") == num_starts + NUM_SLOTS


# ---------------------------------------------------------------- nodes that stop, channels that fail


def test_a_stopped_prefill_node_is_given_up_and_used_again_when_it_goes_on(watched: Watched, whole: Node) -> None:
    prompt, again = new_prompt(FAR), new_prompt(3 * CHUNK)
    before = watched.control.count("chunk_ready")
    asking = Asking(watched.decode, prompt, NUM_NEW)
    watched.control.wait_for("chunk_ready", before)
    with stopped(watched.prefill.process.pid, watched.prefill.rank_pid):
        answer = asking.result()
        assert answer.placement.startswith("local;reason=")
    assert answer.token_ids == whole.ask(prompt, NUM_NEW).token_ids
    watched.settle()
    wait_until_connected(watched.decode)
    assert watched.decode.ask(again, NUM_NEW).token_ids == whole.ask(again, NUM_NEW).token_ids
    watched.settle()


def test_a_decode_node_stopped_for_longer_than_the_lease_answers_right_or_not_at_all(
    watched: Watched, whole: Node
) -> None:
    """Its blocks are given to others meanwhile; what it goes on to read it must not use."""
    prompt = new_prompt(FAR)
    before = watched.control.count("chunk_ready")
    num_expired = watched.prefill.load().counters.get("lease:revoked:expired", 0)
    asking = Asking(watched.decode, prompt, NUM_NEW)
    watched.control.wait_for("chunk_ready", before)
    with stopped(watched.decode.process.pid, watched.decode.rank_pid):
        wait_for(
            lambda: watched.prefill.load().counters.get("lease:revoked:expired", 0) > num_expired,
            lambda: watched.prefill.log,
        )
        watched.prefill.wait_until_quiet()
    assert asking.result().token_ids == whole.ask(prompt, NUM_NEW).token_ids
    watched.settle()


DISTURBANCES: dict[str, Callable[[ControlProxy], None]] = {
    "held": ControlProxy.hold,
    "cut": ControlProxy.cut,
    "truncated": lambda proxy: proxy.truncate(5),
}


@pytest.mark.parametrize("how", DISTURBANCES)
def test_a_control_channel_that_fails_while_kv_flows_costs_no_answer_and_no_block(
    watched: Watched, whole: Node, how: str
) -> None:
    prompt, again = new_prompt(), new_prompt(3 * CHUNK)
    before = watched.control.count("chunk_ready")
    asking = Asking(watched.decode, prompt, NUM_NEW)
    watched.control.wait_for("chunk_ready", before)
    watched.control.do(DISTURBANCES[how])
    try:
        answer = asking.result()
    finally:
        watched.control.do(ControlProxy.heal)
    assert answer.token_ids == whole.ask(prompt, NUM_NEW).token_ids
    watched.settle()
    wait_until_connected(watched.decode)
    assert watched.decode.ask(again, NUM_NEW).token_ids == whole.ask(again, NUM_NEW).token_ids
    watched.settle()


def test_a_slow_control_channel_changes_no_answer(watched: Watched, whole: Node) -> None:
    prompt = new_prompt(4 * CHUNK)
    watched.control.do(lambda proxy: proxy.slow(0.05))
    try:
        assert watched.decode.ask(prompt, NUM_NEW).token_ids == whole.ask(prompt, NUM_NEW).token_ids
    finally:
        watched.control.do(ControlProxy.heal)
    watched.settle()


# ---------------------------------------------------------------- references, limits, mismatches


def test_a_lease_that_is_over_or_somebody_elses_is_never_confirmed(watched: Watched) -> None:
    async def forge() -> None:
        async with decode_by_hand(watched.prefill) as by_hand:  # type: ignore[arg-type]
            stale = await consumed_lease(by_hand)
            stream = await by_hand.begin(new_prompt(2 * CHUNK), "forger")
            await stream.hear_the_prompt_out()
            await stream.say(Release(stale))
            code, details = await stream.fate()
            assert code is not grpc.StatusCode.OK
            assert f"lease_id {stale!r} is not this stream's" in details

    asyncio.run(forge())
    watched.settle()


async def consumed_lease(by_hand: DecodeByHand) -> LeaseId:
    """One that was released in good order."""
    stream = await by_hand.begin(new_prompt(CHUNK), "honest")
    accepted: Accepted = await stream.hear(Accepted)
    await stream.hear_the_prompt_out()
    await stream.say(Release(accepted.lease_id))
    assert (await stream.hear(Released)).is_valid
    return accepted.lease_id


def test_more_requests_than_slots_queue_and_past_the_queue_are_refused_at_once(watched: Watched, whole: Node) -> None:
    prompts = [new_prompt(CHUNK) for _ in range(NUM_SLOTS + NUM_QUEUED + 4)]
    with stopped(watched.decode.rank_pid):
        asked = [Asking(watched.decode, prompt, NUM_NEW) for prompt in prompts]
        # Nobody is answered while the rank is stopped: who is over now was refused.
        wait_for(lambda: sum(not one.is_alive() for one in asked) == 4, lambda: watched.decode.log)
    refused = [one for one in asked if isinstance(one.fate(), QueueFull)]
    assert len(refused) == 4
    with ThreadPoolExecutor(NUM_SLOTS) as threads:
        wanted = list(threads.map(lambda prompt: whole.ask(prompt, NUM_NEW).token_ids, prompts))
    for one, tokens in zip(asked, wanted, strict=True):
        assert one in refused or one.result().token_ids == tokens
    watched.settle()


def flip_one_bit(path: Path) -> None:
    """In the middle of a layer's tensor, and where a look at 4 KiB in each 256th of the file would not see it."""
    with path.open("r+b") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        start, end = json.loads(file.read(header_bytes))["model.layers.2.mlp.down_proj.weight"]["data_offsets"]
        stride = -(-path.stat().st_size // 256)
        middle = 8 + header_bytes + (start + end) // 2
        offset = middle // stride * stride + stride // 2
        assert offset % stride > 4096
        assert start < offset - 8 - header_bytes < end
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


def test_a_peer_whose_weights_differ_in_one_bit_is_refused_with_the_field(
    quick_nodes: Nodes, watched: Watched, tmp_path: Path
) -> None:
    other = make_model(tmp_path / "other", QUICK)
    flip_one_bit(other / "model.safetensors")
    decode = quick_nodes.start(
        Role.DECODE, model=str(other), prefill_peers=(watched.control.address,), decode_fallback="fail"
    )
    wait_for(lambda: "model_revision: " in decode.log, lambda: decode.log)
    with pytest.raises(PeerMismatch, match=r"model_revision: .* here, .* there"):
        decode.ask([1, 2, 3])
    decode.process.end()


# ---------------------------------------------------------------- clocks

SKEW = """
import time
monotonic, wall = time.monotonic, time.time
time.monotonic = lambda: monotonic() + 5_000_000.0
time.time = lambda: wall() - 86_400.0
"""


def test_nodes_whose_clocks_differ_by_days_hand_over_as_others_do(
    quick_nodes: Nodes, whole: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one node's clock says means nothing to the other: durations cross, and never a time."""
    (tmp_path / "sitecustomize.py").write_text(SKEW)
    with monkeypatch.context() as skewed:
        skewed.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        prefill = quick_nodes.begin(Role.PREFILL, kv_lease_s=LEASE_S, **SETTINGS)
    decode = quick_nodes.begin(Role.DECODE, prefill_peers=(prefill.address,), decode_fallback="fail", **SETTINGS)
    for node in (prefill, decode):
        wait_until_serving(node)
    wait_until_connected(decode)
    prompt = new_prompt()
    with decode.client() as client:
        answer = client.generate(token_ids=prompt, max_new_tokens=NUM_NEW, temperature=0.0, timeout_s=PATIENCE_S)
    assert answer.placement == f"remote;peer={prefill.address}"
    assert answer.token_ids == whole.ask(prompt, NUM_NEW).token_ids
    for node in (decode, prefill):
        node.wait_until_quiet()
        node.process.end()

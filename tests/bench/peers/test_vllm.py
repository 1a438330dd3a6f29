"""The client of vLLM's two steps, against a server that speaks as vLLM does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.bench.listening import Call
from pdserve.bench.peers.http_server import HttpServer, ServerFailed
from pdserve.bench.peers.vllm import VllmPair
from pdserve.config.ports import free_port
from tests.bench.peers.completion_server import TRANSFER, Server, answering


@pytest.fixture
def server() -> Iterator[Server]:
    with answering() as server:
        yield server


@pytest.fixture
def pair(server: Server, tmp_path: Path) -> Iterator[VllmPair]:
    prefill, decode = (HttpServer(name, [], server.server_port, tmp_path / name) for name in ("prefill", "decode"))
    pair = VllmPair(prefill, decode)
    yield pair
    pair.end()


async def test_the_decode_step_gets_what_the_prefill_step_gave(server: Server, pair: VllmPair) -> None:
    heard = await pair.hear(Call(7, (5, 6), 4))
    assert (heard.number, heard.token_ids, len(heard.arrivals_s)) == (7, (0, 1, 2, 3), 4)
    prefill, decode = server.posted
    assert (prefill["max_tokens"], prefill["kv_transfer_params"]["do_remote_decode"]) == (1, True)
    assert (decode["max_tokens"], decode["kv_transfer_params"]) == (4, TRANSFER)
    assert prefill["prompt"] == decode["prompt"] == [5, 6]


async def test_a_stream_is_given_up_when_it_is_enough(pair: VllmPair) -> None:
    heard = await pair.hear(Call(0, (5, 6), 50), lambda num_tokens: num_tokens == 3)
    assert heard.token_ids == (0, 1, 2)


async def test_a_refusal_and_a_stream_that_ends_early_are_told(server: Server, pair: VllmPair) -> None:
    server.num_said = 2
    with pytest.raises(ServerFailed, match="the stream ended after 2 of 4 tokens"):
        await pair.hear(Call(0, (5, 6), 4))
    server.status = 500
    with pytest.raises(ServerFailed, match="HTTP 500"):
        await pair.hear(Call(0, (5, 6), 4))


async def test_a_node_that_is_away_is_told(pair: VllmPair) -> None:
    pair.prefill.port = free_port()
    with pytest.raises(ServerFailed, match="refused"):
        await pair.hear(Call(0, (5, 6), 4))

"""What the SDK says where gRPC itself found that something is wrong."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator

import grpc
import pytest

from pdserve.client import AsyncClient, Client, Health
from pdserve.client.channel import target_fault
from pdserve.client.failure import error_from
from pdserve.errors import InvalidRequest, NotReady
from pdserve.rpc.fake import EchoGenerator
from tests.client.test_sync import with_client

NOBODY = "127.0.0.1:1"


@pytest.mark.parametrize("target", ["foo", "foo:", "foo:x", "foo:0", "foo:70000", ":5", "::1:5", "a:1,b:2", ""])
def test_a_target_that_is_no_address_is_refused_where_the_client_is_made(target: str) -> None:
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidRequest) as refused:
            kind([target])
        assert refused.value.field == "targets"
        assert "must be HOST:PORT" in refused.value.message


@pytest.mark.parametrize("target", ["localhost:1", "10.0.0.1:50051", "[::1]:50051", "dns:///name:5", "unix:/tmp/x"])
def test_addresses_and_uris_are_targets(target: str) -> None:
    assert target_fault(target) is None


async def test_where_nobody_listens_the_remedy_is_told() -> None:
    wanted = f"no node answers at {NOBODY}; start one with `pdserve up smollm2`"
    with Client(NOBODY, max_attempts=1) as client, pytest.raises(NotReady, match=wanted):
        await asyncio.to_thread(client.model_info)
    async with AsyncClient(NOBODY, max_attempts=1) as client:
        with pytest.raises(NotReady, match=wanted):
            await client.generate("hi")


@pytest.mark.parametrize(
    ("details", "is_answering", "wanted"),
    [
        ("Stream removed (Socket closed)", True, r"went away in the middle of the answer \(Socket closed\)"),
        ("Socket closed", False, r"went away before it answered \(Socket closed\); the request may be sent again"),
        ("DNS resolution failed for a:1", False, "the host of a:1 is not known"),
        ("failed to connect to all addresses; last error: x", False, "no node answers at a:1"),
    ],
)
def test_what_grpc_found_out_is_told_in_plain_words(details: str, is_answering: bool, wanted: str) -> None:
    error = error_from(grpc.StatusCode.UNAVAILABLE, details, (), "a:1", is_answering)
    assert isinstance(error, NotReady)
    with pytest.raises(NotReady, match=wanted):
        raise error


def test_what_a_node_says_itself_is_left_as_it_is() -> None:
    metadata = [("pdserve-error", "NotReady")]
    assert error_from(grpc.StatusCode.UNAVAILABLE, "the node drains", metadata).message == "the node drains"


async def test_a_node_that_serves_says_so(address: str, generator: EchoGenerator) -> None:
    assert await with_client(address, lambda client: client.health()) is Health.SERVING
    async with AsyncClient(address) as client:
        assert await client.health() is Health.SERVING


def test_the_health_stubs_and_the_sdk_mean_the_same() -> None:
    from grpc_health.v1 import health_pb2

    from pdserve.client.health import decode_health

    for status in (Health.UNKNOWN, Health.SERVING, Health.NOT_SERVING):
        value = health_pb2.HealthCheckResponse.ServingStatus.Value(status.value)
        assert decode_health(health_pb2.HealthCheckResponse(status=value).SerializeToString()) is status


KILLED_NODE = """
import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pdserve.rpc.fake import EchoGenerator, fake_node

async def main():
    generator = EchoGenerator()
    generator.hold_after = 2
    async with fake_node(generator) as address:
        print(address, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def killable() -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A node in a process of its own that holds every answer after two tokens."""
    with subprocess.Popen([sys.executable, "-c", KILLED_NODE], stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        yield node.stdout.readline().strip(), node
        node.kill()


def test_a_node_that_is_killed_in_the_middle_of_an_answer_is_told_so(
    killable: tuple[str, subprocess.Popen[str]],
) -> None:
    address, node = killable
    wanted = f"the node at {address} went away in the middle of the answer"
    with Client(address) as client, client.stream("hi", max_new_tokens=9) as stream:
        next(stream)
        next(stream)
        node.kill()
        with pytest.raises(NotReady, match=wanted):
            list(stream)


async def test_the_same_is_told_by_the_client_for_asyncio(killable: tuple[str, subprocess.Popen[str]]) -> None:
    address, node = killable
    wanted = f"the node at {address} went away in the middle of the answer"
    async with AsyncClient(address) as client, client.stream("hi", max_new_tokens=9) as stream:
        await anext(stream)
        await anext(stream)
        node.kill()
        with pytest.raises(NotReady, match=wanted):
            await anext(stream)

"""What gRPC says, in words that stay the same for the same trouble."""

from __future__ import annotations

import grpc
import pytest

from decode_node.words import QUIET, plain

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "details"),
    [
        (Code.DEADLINE_EXCEEDED, "Stream removed (hpack:...)"),
        (Code.DEADLINE_EXCEEDED, "Deadline Exceeded"),
        (Code.UNAVAILABLE, "keepalive watchdog timeout"),
        (Code.UNAVAILABLE, "ping timeout"),
        (Code.UNAVAILABLE, "connection attempt timed out before receiving SETTINGS frame"),
    ],
)
def test_a_peer_from_which_nothing_comes_went_quiet(code: grpc.StatusCode, details: str) -> None:
    assert plain(error(code, details)) == QUIET


@pytest.mark.parametrize("code", [Code.UNAVAILABLE, Code.FAILED_PRECONDITION])
def test_what_a_peer_or_the_network_says_is_told_as_it_is(code: grpc.StatusCode) -> None:
    assert plain(error(code, "Connection refused")) == f"{code.name}: Connection refused"


def error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=details)

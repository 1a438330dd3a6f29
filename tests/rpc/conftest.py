from collections.abc import AsyncIterator

import grpc.aio
import pytest

from pdserve.rpc.fake import EchoGenerator, fake_node


@pytest.fixture
def generator() -> EchoGenerator:
    return EchoGenerator()


@pytest.fixture
async def channel(generator: EchoGenerator) -> AsyncIterator[grpc.aio.Channel]:
    async with fake_node(generator) as address, grpc.aio.insecure_channel(address) as channel:
        yield channel

from collections.abc import AsyncIterator

import pytest

from pdserve.rpc.fake import EchoGenerator, fake_node


@pytest.fixture
def generator() -> EchoGenerator:
    return EchoGenerator()


@pytest.fixture
async def address(generator: EchoGenerator) -> AsyncIterator[str]:
    async with fake_node(generator) as address:
        yield address

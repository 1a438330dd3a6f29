from collections.abc import AsyncIterator

import pytest

from decode_node import peers
from tests.roles.cluster import Cluster, Pair, cluster


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode nodes look at their peers far more often than between machines."""
    monkeypatch.setattr(peers, "CHECK_S", 0.1)
    monkeypatch.setattr(peers, "FIRST_BACKOFF_S", 0.02)
    monkeypatch.setattr(peers, "MAX_BACKOFF_S", 0.1)


@pytest.fixture
async def nodes() -> AsyncIterator[Cluster]:
    async with cluster() as running:
        yield running


@pytest.fixture
async def pair(nodes: Cluster) -> Pair:
    return await nodes.pair()

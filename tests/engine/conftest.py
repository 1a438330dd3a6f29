from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.engine.channel import private_directory


@pytest.fixture
def sockets() -> Iterator[Path]:
    """Where ipc endpoints may be; pytest's own paths are too long for them."""
    with private_directory() as directory:
        yield directory

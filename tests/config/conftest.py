from collections.abc import Callable
from functools import partial

import pytest

from pdserve.config import ServerArgs
from pdserve.config.fields import FIELDS


@pytest.fixture
def two_ranks() -> Callable[..., ServerArgs]:
    """The settings of a node whose group has two ranks."""
    return partial(ServerArgs, data_parallel_size=2)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name in FIELDS:
        monkeypatch.delenv(f"PDSERVE_{name.upper()}", raising=False)

import pytest

from pdserve.config import ServerArgs
from pdserve.config.fields import FIELDS


class TwoRanks(ServerArgs):
    """The settings of a node whose group has two ranks."""

    @property
    def data_parallel_size(self) -> int:
        return 2


@pytest.fixture
def two_ranks() -> type[ServerArgs]:
    return TwoRanks


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name in FIELDS:
        monkeypatch.delenv(f"PDSERVE_{name.upper()}", raising=False)

"""Which tests run first."""

from __future__ import annotations

from pathlib import Path

import pytest

SYSTEM = Path(__file__).parent / "system"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that wait for real nodes: started last, a long file would keep one process busy and leave others idle."""
    items.sort(key=lambda item: SYSTEM not in item.path.parents)

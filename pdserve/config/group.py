"""Settings of a node with more ranks than the one that a served node has, as a simulation has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import PrivateAttr

from pdserve.config import ServerArgs
from pdserve.config.fields import FIELDS


class GroupArgs(ServerArgs):
    """A node's settings, judged for a group of `data_parallel_size` ranks."""

    _num_ranks: int = PrivateAttr(default=1)

    @classmethod
    def of(cls, num_ranks: int, given: Mapping[str, Any]) -> GroupArgs:
        """Unchecked, as settings made in code are until `validate()`."""
        values = {name: field.default for name, field in FIELDS.items()}
        args = cls.model_construct(set(given), **(values | dict(given)))
        args._num_ranks = num_ranks
        return args

    @property
    def data_parallel_size(self) -> int:
        return self._num_ranks

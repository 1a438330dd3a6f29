"""The fields of a config.json with their checks: a value, or one line with the field, its value and the remedy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from pdserve.errors import StartupError


class Fields:
    """`prefix` names the object they are in."""

    def __init__(self, raw: Mapping[str, Any], path: Path, prefix: str = "") -> None:
        self.raw = raw
        self.path = path
        self._prefix = prefix

    def refuse(self, field: str, remedy: str) -> NoReturn:
        raise StartupError(f"{self.path}: {self._prefix}{field} is {json.dumps(self.raw.get(field))}; {remedy}")

    def number(self, field: str, default: float | None = None) -> float:
        value: Any = self.raw.get(field)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            self.refuse(field, "a positive number is needed; the config is incomplete or damaged")
        return float(value)

    def integer(self, field: str, default: int | None = None) -> int:
        value = self.number(field, default)
        if value != int(value):
            self.refuse(field, "a whole number is needed; the config is damaged")
        return int(value)

    def optional(self, field: str) -> float | None:
        return None if self.raw.get(field) is None else self.number(field)

    def boolean(self, field: str, default: bool) -> bool:
        value: Any = self.raw.get(field)
        value = default if value is None else value
        if not isinstance(value, bool):
            self.refuse(field, "true or false is needed; the config is damaged")
        return value

    def indices(self, field: str) -> frozenset[int]:
        """A list of numbers from 0 on; empty where there is none."""
        value: Any = self.raw.get(field) or []
        if not isinstance(value, list) or not all(type(index) is int and index >= 0 for index in value):
            self.refuse(field, "a list of whole numbers from 0 on is needed; the config is damaged")
        return frozenset(value)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in `path`; None if there is no such file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StartupError(f"{path} cannot be read: {error}; fetch the model again") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} holds a {type(value).__name__}, not an object; fetch the model again")
    return value

"""What is wrong with a configuration, all of it at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdserve.errors import StartupError


@dataclass(frozen=True, slots=True)
class Fault:
    """One wrong setting. subject: the flag, variable or file; origin: where the value came from if not from a flag."""

    subject: str
    value: object
    reason: str
    origin: str = ""

    def __str__(self) -> str:
        value = "" if self.value is None else f" {shown(self.value)}"
        where = f" (from {self.origin})" if self.origin else ""
        return f"{self.subject}{value}{where}: {self.reason}"


class ConfigError(StartupError, ValueError):
    """Settings that can't be run with: one line, or a line a fault where there are several."""

    def __init__(self, faults: Iterable[Fault]) -> None:
        self.faults = tuple(faults)
        assert self.faults
        lines = [str(fault) for fault in self.faults]
        several = f"{len(lines)} settings are wrong:\n  " + "\n  ".join(lines)
        super().__init__(lines[0] if len(lines) == 1 else several)


def unless_about(faults: Iterable[Fault], more: Iterable[Fault]) -> list[Fault]:
    """`more` without subjects that have a fault already: what a rule says of a value that can't be read is noise."""
    subjects = {fault.subject for fault in faults}
    return [fault for fault in more if fault.subject not in subjects]


def shown(value: object) -> str:
    """A value as a person would write it after a flag."""
    if isinstance(value, tuple | list):
        return ",".join(str(item) for item in value)
    return str(value)

"""Command-line flags made from a model's fields: one flag a field, in groups, with defaults shown.

Values stay text here; whoever owns the fields turns them into numbers, so that every wrong one is reported together.
"""

from __future__ import annotations

import argparse
import difflib
import enum
import types
import typing
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol


@dataclass(frozen=True, slots=True)
class Flag:
    """How a field reads on the command line. only: the kinds of node that heed it; empty = all.

    alias: a shorter name, without the dashes.
    """

    group: str
    help: str
    metavar: str = "N"
    only: tuple[str, ...] = ()
    alias: str = ""


class Field(Protocol):
    """The part of pydantic's FieldInfo that a flag is made from."""

    metadata: list[Any]

    @property
    def annotation(self) -> Any: ...

    @property
    def default(self) -> Any: ...


class FlagError(Exception):
    """The command line can't be split into flags and values."""


class FlagParser(argparse.ArgumentParser):
    """Takes no abbreviations; raises FlagError where argparse would print its usage and leave."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, argument_default=None, **settings
        )

    def error(self, message: str) -> NoReturn:
        raise FlagError(f"{message}; see {self.prog} --help")


def spelled(name: str) -> str:
    """The flag of the field `name`."""
    return "--" + name.replace("_", "-")


def described(field: Field) -> Flag:
    """The Flag among a field's annotations."""
    return next(item for item in field.metadata if isinstance(item, Flag))


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was probably meant to be."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), None)


# What `kinds` says of every list of words.
LIST: Any = tuple


def kinds(annotation: Any) -> list[Any]:
    """The types a field takes: int | None gives int and NoneType; a list of words is LIST."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return [kind for part in typing.get_args(annotation) for kind in kinds(part)]
    if typing.get_origin(annotation) is typing.Annotated:
        return kinds(typing.get_args(annotation)[0])
    return [LIST if typing.get_origin(annotation) is tuple else annotation]


def add_flags(parser: argparse.ArgumentParser, fields: Mapping[str, Field], hidden: Collection[str] = ()) -> None:
    """One flag a field, each in its group. A flag that isn't given leaves no attribute behind.

    hidden: fields whose flags are read, for their refusal to give the reason, and not shown.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, field in fields.items():
        flag = described(field)
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        settings = _settings(flag, field)
        if name in hidden:
            settings["help"] = argparse.SUPPRESS
        names = [spelled(name), *([spelled(flag.alias)] if flag.alias else [])]
        groups[flag.group].add_argument(*names, dest=name, default=argparse.SUPPRESS, **settings)


def _settings(flag: Flag, field: Field) -> dict[str, Any]:
    text = _with_default(flag, field).replace("%", "%%")
    if field.annotation is bool:
        return {"action": argparse.BooleanOptionalAction, "help": text}
    if LIST in kinds(field.annotation):
        return {"action": "append", "metavar": flag.metavar, "help": text}
    return {"metavar": _metavar(flag, field.annotation), "help": text}


def _metavar(flag: Flag, annotation: Any) -> str:
    """What stands for the value in the help: the words the field takes, its number's name, or both."""
    words = _words(annotation)
    return "|".join(words if words and int not in kinds(annotation) else [flag.metavar, *words])


def _words(annotation: Any) -> list[str]:
    for kind in kinds(annotation):
        if isinstance(kind, type) and issubclass(kind, enum.Enum):
            return [str(member.value) for member in kind]
        if typing.get_origin(kind) is typing.Literal:
            return [str(value) for value in typing.get_args(kind)]
    return []


def _with_default(flag: Flag, field: Field) -> str:
    notes = [f"{' and '.join(flag.only)} only"] if flag.only else []
    if field.annotation is bool:
        notes.append(f"default: {'on' if field.default else 'off'}")
    elif field.default not in (None, ()) and not repr(field.default).startswith("PydanticUndefined"):
        value = field.default
        notes.append(f"default: {f'{value:g}' if isinstance(value, float) else value}")
    return f"{flag.help} ({'; '.join(notes)})" if notes else flag.help

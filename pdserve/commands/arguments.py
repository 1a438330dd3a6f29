"""Arguments that are checked one and all: each type here gives a Fault for a value that is wrong, where argparse would
stop at the first, and `read` tells all of them together. Paths are tried at once, before anything is started.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pdserve.errors import StartupError
from pdserve.faults import ConfigError, Fault, unless_about

T = TypeVar("T")
# For the `type` of an argument: its value, or what is wrong with it.
Check = Callable[[str], Any]
STANDARD_OUTPUT = "-"


def nothing_more(arguments: argparse.Namespace) -> Iterable[Fault]:
    """No rule between arguments."""
    return ()


def read(
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    more: Callable[[argparse.Namespace], Iterable[Fault]] = nothing_more,
) -> argparse.Namespace:
    """The arguments. more: rules between them; it sees the default in place of a value that is wrong by itself.

    Raises ConfigError with everything that is wrong.
    """
    arguments, unknown = parser.parse_known_args(argv)
    faults = [_unknown(word, parser.prog) for word in unknown if word.startswith("-")]
    if not faults:
        faults = [_unknown(word, parser.prog) for word in unknown]
    for name, fault in faults_by_name(vars(arguments)):
        faults.append(fault)
        setattr(arguments, name, parser.get_default(name))
    refuse([*faults, *unless_about(faults, more(arguments))])
    return arguments


def refuse(faults: Iterable[Fault]) -> None:
    """Raises ConfigError where there are any; each is told once."""
    if told := {str(fault): fault for fault in faults}:
        raise ConfigError(told.values())


def faults_by_name(values: dict[str, Any]) -> list[tuple[str, Fault]]:
    """What the types here refused, alone or in a list of values, by the argument's name."""
    found = ((name, one) for name, value in values.items() for one in (value if isinstance(value, list) else [value]))
    return [(name, one) for name, one in found if isinstance(one, Fault)]


def _unknown(word: str, prog: str) -> Fault:
    if word.startswith("-"):
        return Fault(word.partition("=")[0], None, f"there is no such flag; see {prog} --help")
    return Fault(word, None, f"is one word too many; see {prog} --help")


# ---------------------------------------------------------------- types of arguments


def whole(flag: str, least: int | None = None, most: int | None = None) -> Check:
    """A whole number from `least` to `most`, where these are given."""

    def check(text: str) -> int | Fault:
        try:
            value = int(text)
        except ValueError:
            return Fault(flag, text, "must be a whole number")
        if (least is not None and value < least) or (most is not None and value > most):
            wanted = f"at least {least}" if most is None else f"from {least} to {most:,}"
            return Fault(flag, text, f"must be {wanted}")
        return value

    return check


def real(flag: str, least: float = -math.inf, above: float = -math.inf, most: float = math.inf) -> Check:
    """A finite number of at least `least`, more than `above` and at most `most`."""

    def check(text: str) -> float | Fault:
        try:
            value = float(text)
        except ValueError:
            return Fault(flag, text, "must be a number")
        if math.isfinite(value) and least <= value <= most and value > above:
            return value
        ends = [f"more than {above:g}"] * (above > -math.inf) + [f"at least {least:g}"] * (least > -math.inf)
        ends += [f"at most {most:g}"] * (most < math.inf)
        return Fault(flag, text, f"must be {' and '.join(ends) or 'a finite number'}")

    return check


def one_of(flag: str, names: Collection[str]) -> Check:
    """A word of a list."""
    return lambda text: text if text in names else Fault(flag, text, f"give one of {', '.join(names)}")


def parsed(flag: str, parse: Callable[[str], T]) -> Check:
    """What `parse` makes of the text; its StartupErrors are faults of this flag."""

    def check(text: str) -> T | Fault:
        try:
            return parse(text)
        except StartupError as error:
            return as_fault(flag, text, error)

    return check


def as_fault(flag: str, value: str, error: StartupError) -> Fault:
    """An error that is about one flag; one that names the flag and its value does so once."""
    return Fault(flag, value, error.message.removeprefix(f"{flag} {value}").lstrip(": "))


# ---------------------------------------------------------------- paths


def read_file(flag: str) -> Check:
    """A file that can be read."""

    def check(text: str) -> str | Fault:
        try:
            with Path(text).open("rb"):
                return text
        except OSError as error:
            return Fault(flag, text, f"can't be read ({error.strerror}); check the path")

    return check


def written_file(flag: str, *, may_be_output: bool = False) -> Check:
    """A file that can be written, which is tried. may_be_output: `-` is standard output."""

    def check(text: str) -> str | Fault:
        if text == STANDARD_OUTPUT:
            return text if may_be_output else Fault(flag, text, "is no file; give a path (only --json writes to -)")
        reason = _why_not_written(Path(text))
        return Fault(flag, text, reason) if reason else text

    return check


def picture(flag: str) -> Check:
    """A file that matplotlib can draw, if it is installed."""
    written = written_file(flag)

    def check(text: str) -> str | Fault:
        if importlib.util.find_spec("matplotlib") is None:
            return Fault(flag, text, 'needs matplotlib; pip install "pdserve[bench]"')
        checked: str | Fault = written(text)
        return checked

    return check


def kept_directory(flag: str) -> Check:
    """A directory to write into, made later if there is none; that it can be made and written is tried."""

    def check(text: str) -> str | Fault:
        there = next(path for path in (Path(text).absolute(), *Path(text).absolute().parents) if path.exists())
        if not there.is_dir():
            return Fault(flag, text, f"{there} is no directory; give another path")
        try:
            with tempfile.TemporaryDirectory(dir=there):
                return text
        except OSError as error:
            return Fault(flag, text, f"can't be written ({error.strerror}); give another path")

    return check


def _why_not_written(path: Path) -> str | None:
    """None where it can. What was not there is not there afterwards."""
    if path.is_dir():
        return "is a directory; name a file"
    if not path.parent.is_dir():
        return f"there is no directory {path.parent}; make it first"
    is_new = not path.exists()
    if not is_new and not path.is_file():
        return None  # a device or a pipe: to open it may already mean something
    try:
        path.open("ab").close()
    except OSError as error:
        return f"can't be written ({error.strerror}); check the path"
    if is_new:
        path.unlink(missing_ok=True)
    return None


def missing(flag: str, remedy: str) -> Iterator[Fault]:
    """The fault of a flag that has to be given."""
    yield Fault(flag, None, f"is missing; {remedy}")

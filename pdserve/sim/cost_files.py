"""Cost files: a cost model as JSON, with the deployment it was measured on. Read strictly, all faults told together.

    name, source                        what it is, and where its numbers come from
    block_size, block_bytes             tokens and bytes of a KV block
    fused, prefill, decode              seconds of a rank of each kind of node: see costs.RankCosts
    handoff, tiers, front, noise        see costs.py
    deployment                          the deployment's knobs by name; flags override them: see deployment.Deployment
    fit                                 (optional) names to numbers: how well the model fits what was measured

`source` may be a list of lines, so that a derivation can be read. Shipped files are named without path and ending.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, cast

from pdserve.config import ConfigError, Fault
from pdserve.errors import StartupError
from pdserve.sim.costs import CostModel
from pdserve.sim.deployment import COUNTS, SETTINGS, Deployment

ENDING = ".json"
KNOBS = (*SETTINGS, *COUNTS)
OWN_KEYS = ("deployment", "fit")
# Bounds that no machine comes near, and a clock of floats still takes.
MOST, MOST_SECONDS, MOST_NOISE = 1e18, 1e6, 3.0
# What something is divided by.
POSITIVE = {"bytes_per_s", "host_bytes_per_s", "storage_bytes_per_s"}


@dataclass(frozen=True, slots=True)
class CostFile:
    """A cost model with the deployment it is about. fit: told with it, used for nothing."""

    costs: CostModel
    deployment: Deployment
    fit: Mapping[str, float] = field(default_factory=dict)


def shipped() -> list[str]:
    """Names that `load` takes beside paths."""
    folder = resources.files("pdserve.sim") / "cost_data"
    return sorted(item.name.removesuffix(ENDING) for item in folder.iterdir() if item.name.endswith(ENDING))


def load(name_or_path: str | Path) -> CostFile:
    """A shipped cost file by its name, or one of the user's by its path. Raises ConfigError with all faults."""
    text, origin = _text(str(name_or_path))
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{origin} is no JSON: {error}; a shipped cost file shows the format") from None
    if not isinstance(found, dict):
        raise StartupError(f"{origin} must hold one JSON object; a shipped cost file shows the format")
    return parse(found, origin)


def parse(found: Mapping[str, Any], origin: str = "") -> CostFile:
    """The cost file that an object of this shape means. Raises ConfigError with all faults."""
    reader = _Reader(origin)
    own = {key: reader.table(key, found.get(key, {})) for key in OWN_KEYS}
    source = found.get("source")
    if isinstance(source, list) and all(isinstance(line, str) for line in source):
        found = {**found, "source": "\n".join(source)}
    costs = reader.dataclass(CostModel, {key: value for key, value in found.items() if key not in OWN_KEYS}, "")
    fit = {key: reader.number(f"fit.{key}", value, least=-math.inf) for key, value in own["fit"].items()}
    knobs = reader.knobs(own["deployment"])
    if reader.faults:
        raise ConfigError(reader.faults)
    deployment = Deployment(costs, **knobs)
    if faults := deployment.faults():
        raise ConfigError(dataclasses.replace(fault, origin=origin) for fault in faults)
    return CostFile(costs, deployment, fit)


def save(cost_file: CostFile, path: Path) -> None:
    """Write it so that `load` gives it back. Raises StartupError where that is not possible."""
    knobs = {
        name: value
        for name in KNOBS
        if (value := getattr(cost_file.deployment, name)) != _default(Deployment, name) and value is not None
    }
    costs = dataclasses.asdict(cost_file.costs)
    lines = costs["source"].splitlines()
    found = {**costs, "source": lines if len(lines) > 1 else costs["source"], "deployment": knobs}
    if cost_file.fit:
        found["fit"] = dict(cost_file.fit)
    try:
        path.write_text(json.dumps(found, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise StartupError(f"{path} can't be written ({error.strerror}); check the path") from None


def _text(name_or_path: str) -> tuple[str, str]:
    if name_or_path in shipped():
        item = resources.files("pdserve.sim") / "cost_data" / (name_or_path + ENDING)
        return item.read_text(encoding="utf-8"), f"the shipped cost file {name_or_path}"
    try:
        return Path(name_or_path).read_text(encoding="utf-8"), name_or_path
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        names = ", ".join(shipped())
        raise StartupError(f"--costs {name_or_path} can't be read ({why}); give a path, or one of {names}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"{next(key for key in keys if keys.count(key) > 1)} is given twice")
    return found


def _default(cls: type[Any], name: str) -> Any:
    return next(item.default for item in dataclasses.fields(cls) if item.name == name)


def _most(name: str) -> float:
    """Of the number `name`: what is beyond is a mistake, and would overflow the clock."""
    if name == "noise":
        return MOST_NOISE
    return MOST if "bytes" in name else MOST_SECONDS


class _Reader:
    """Turns JSON values into fields and notes what is wrong; a value it noted has a stand-in in the result."""

    def __init__(self, origin: str) -> None:
        self._origin = origin
        self.faults: list[Fault] = []

    def dataclass(self, cls: type[Any], found: Mapping[str, Any], prefix: str) -> Any:
        """An instance of `cls`, whose fields are numbers, texts and dataclasses of such."""
        kinds = typing.get_type_hints(cls)
        fields = {item.name: item for item in dataclasses.fields(cls)}
        for key in sorted(found.keys() - fields.keys()):
            self._note(prefix + key, found[key], f"is not known here; known are {', '.join(fields)}")
        values = {}
        for name, item in fields.items():
            if name in found:
                values[name] = self._field(kinds[name], prefix + name, found[name])
            elif item.default is dataclasses.MISSING:
                self._note(prefix + name, None, "is missing")
                values[name] = None
        return cls(**values)

    def _field(self, kind: type[Any], path: str, value: object) -> Any:
        if dataclasses.is_dataclass(kind):
            return self.dataclass(kind, self.table(path, value), f"{path}.")
        if kind is str:
            return self._text(path, value)
        if kind is int:
            return self._count(path, value)
        if typing.get_origin(kind) is tuple:
            return self._curve(path, value)
        name = path.rpartition(".")[2]
        return self.number(path, value, is_positive=name in POSITIVE, most=_most(name))

    def table(self, path: str, value: object) -> dict[str, Any]:
        if isinstance(value, dict):
            return cast(dict[str, Any], value)
        self._note(path, value, "must be an object")
        return {}

    def number(
        self, path: str, value: object, least: float = 0.0, is_positive: bool = False, most: float = MOST
    ) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self._note(path, value, "must be a number")
        elif value < least or (is_positive and value == 0):
            self._note(path, value, "must be more than 0" if is_positive else "must not be negative")
        elif value > most:
            self._note(path, value, f"must be at most {most:g}")
        else:
            return float(value)
        return 1.0

    def _count(self, path: str, value: object) -> int:
        if type(value) is int and 1 <= value <= MOST:
            return value
        self._note(path, value, f"must be a whole number from 1 to {MOST:g}")
        return 1

    def _curve(self, path: str, value: object) -> tuple[tuple[int, float], ...]:
        """Points [count, seconds] whose counts ascend."""
        points: list[Any] = value if isinstance(value, list) else [None]
        if not all(isinstance(point, list) and len(point) == 2 for point in points):
            self._note(path, value, "must be a list of [amount, seconds]")
            return ()
        curve = tuple(
            (self._count(path, amount), self.number(path, seconds, most=MOST_SECONDS)) for amount, seconds in points
        )
        if any(after[0] <= before[0] for before, after in itertools.pairwise(curve)):
            self._note(path, value, "must have its amounts in ascending order")
        return curve

    def _text(self, path: str, value: object) -> str:
        if isinstance(value, str) and value.strip():
            return value
        self._note(path, value, "must be some words")
        return "-"

    def knobs(self, found: Mapping[str, Any]) -> dict[str, Any]:
        for key in sorted(found.keys() - set(KNOBS)):
            self._note(f"deployment.{key}", found[key], f"is no knob; known are {', '.join(KNOBS)}")
        if "num_kv_blocks" not in found:
            self._note("deployment.num_kv_blocks", None, "is missing: a pool has to have a size")
        return {key: value for key, value in found.items() if key in KNOBS}

    def _note(self, path: str, value: object, reason: str) -> None:
        shown = None if value is None else json.dumps(value, ensure_ascii=False)
        self.faults.append(Fault(path, shown, reason, self._origin))

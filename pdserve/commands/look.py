"""One look at nodes: their health, who they are, and the loads of their ranks, of all nodes at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from pdserve.client import Client, Health, ServerInfo
from pdserve.errors import DeadlineExceeded, NotReady, PdserveError
from pdserve.request import RankLoad

T = TypeVar("T")
UNREACHABLE = "UNREACHABLE"
MOST_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Look:
    """What one node said. health: SERVING, NOT_SERVING, UNKNOWN or UNREACHABLE. reasons: of what it didn't say, or said
    is wrong. has_integrity: its tables agree; None where that was not asked.
    """

    target: str
    health: str
    role: str | None = None
    incarnation: str | None = None
    version: str | None = None
    model: str | None = None
    uptime_s: float | None = None
    ranks: tuple[RankLoad, ...] = ()
    has_integrity: bool | None = None
    reasons: tuple[str, ...] = field(default=())

    @property
    def is_well(self) -> bool:
        return self.health == Health.SERVING.value and self.has_integrity is not False

    def figures(self) -> dict[str, object]:
        """Under stable names, for a program."""
        return {**asdict(self), "is_well": self.is_well}


def look_at(targets: Sequence[str], timeout_s: float, check_integrity: bool = False) -> list[Look]:
    """Each node, in the order of targets; a node that doesn't answer takes at most timeout_s a question."""
    with ThreadPoolExecutor(min(len(targets), MOST_AT_ONCE)) as pool:
        return list(pool.map(lambda target: look_at_one(target, timeout_s, check_integrity), targets))


def look_at_one(target: str, timeout_s: float, check_integrity: bool = False) -> Look:
    """One node. Raises nothing that a node can cause."""
    with Client(target, timeout_s=timeout_s, max_attempts=1) as client:
        try:
            health = client.health()
        except (NotReady, DeadlineExceeded) as error:
            return Look(target, UNREACHABLE, reasons=(_unreachable(error, timeout_s),))
        except PdserveError as error:
            return Look(target, Health.UNKNOWN.value, reasons=(f"its health can't be asked: {error.message}",))
        return _asked(client, target, health, check_integrity)


def _unreachable(error: PdserveError, timeout_s: float) -> str:
    return f"said nothing within {timeout_s:g} s" if isinstance(error, DeadlineExceeded) else error.message


def _asked(client: Client, target: str, health: Health, check_integrity: bool) -> Look:
    reasons: list[str] = []
    server = _tried(client.server_info, reasons) or ServerInfo("", 0.0, {})
    model = _tried(client.model_info, reasons)
    ranks = _tried(lambda: client.loads(check_integrity=check_integrity), reasons)
    return Look(
        target,
        health.value,
        server.settings.get("role"),
        server.settings.get("incarnation"),
        server.version or None,
        model.served_name if model is not None else None,
        server.uptime_s if server.version else None,
        ranks or (),
        ranks is not None if check_integrity else None,
        tuple(dict.fromkeys(reasons)),
    )


def _tried(ask: Callable[[], T], reasons: list[str]) -> T | None:
    try:
        return ask()
    except PdserveError as error:
        reasons.append(error.message)
        return None

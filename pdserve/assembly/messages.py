"""What the nodes of a group tell each other. Typed msgpack by msgspec, never pickle."""

from __future__ import annotations

import msgspec

from pdserve.engine.launch import RankSpec
from pdserve.engine.process_look import ProcessLook


class Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all that is encoded."""


# ---------------------------------------------------------------- headless → first


class Hello(Message, frozen=True):
    """A headless node offers its machine. version: of pdserve. revision: of the model it would load."""

    version: str
    node_rank: int
    num_nodes: int
    revision: str


class Looks(Message, frozen=True):
    """Its process is there, and so are those of its ranks, as they look by now."""

    looks: dict[int, ProcessLook]


class RankEnded(Message, frozen=True):
    """status: as of a process, negative for a signal."""

    rank: int
    status: int


FromHeadless = Hello | Looks | RankEnded

# ---------------------------------------------------------------- first → headless


class Refused(Message, frozen=True):
    """reason ends with the remedy. is_final: trying again will not help."""

    reason: str
    is_final: bool


class Orders(Message, frozen=True):
    """Start these ranks. Paths in them are the first node's; a headless node puts its own."""

    specs: tuple[RankSpec, ...]


class Alive(Message, frozen=True):
    """The first node's process is there."""


ToHeadless = Refused | Orders | Alive

"""Where the addresses of prefill nodes come from: the command line itself, a name service, a file that is watched."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Protocol

import yaml

from pdserve.config.peer_address import dns_name, file_path, join_address, split_address
from pdserve.errors import PeerError

log = logging.getLogger(__name__)

# How often a name is resolved again, and at most how often where a peer behind it is lost.
RESOLVE_S = 10.0
RESOLVE_AT_LEAST_S = 1.0
# How often a file is looked at.
LOOK_S = 1.0

OnTargets = Callable[[tuple[str, ...]], None]


class PeerSource(Protocol):
    """One entry of --prefill-peers whose addresses may change."""

    async def watch(self, on_targets: OnTargets) -> None:
        """Tell all addresses, HOST:PORT, as soon as they are known and whenever they have changed, until cancelled."""

    def look_again(self) -> None:
        """A peer of it may have moved."""


class PeerSources:
    """All entries as one. static: the addresses that were given as such, which never change."""

    def __init__(self, entries: Iterable[str]) -> None:
        entries = tuple(dict.fromkeys(entries))
        self._moving = [source for entry in entries if (source := moving_source(entry)) is not None]
        self.static = tuple(entry for entry in entries if moving_source(entry) is None)
        self._found: dict[int, tuple[str, ...]] = {}
        self.names = ", ".join(entries)

    async def watch(self, on_targets: OnTargets) -> None:
        """Tell the addresses of all entries together, each once, whenever those of one have changed."""

        def on_found(number: int, targets: tuple[str, ...]) -> None:
            self._found[number] = targets
            on_targets(tuple(dict.fromkeys([*self.static, *(t for found in self._found.values() for t in found)])))

        async with asyncio.TaskGroup() as group:
            for number, source in enumerate(self._moving):
                group.create_task(source.watch(partial(on_found, number)))

    def look_again(self) -> None:
        for source in self._moving:
            source.look_again()


def moving_source(entry: str) -> PeerSource | None:
    """The source behind an entry of --prefill-peers; None for an address, which stays what it is."""
    if (name := dns_name(entry)) is not None:
        return DnsSource(name)
    if (path := file_path(entry)) is not None:
        return FileSource(Path(path))
    return None


Resolve = Callable[[str, int], list[str]]


def resolve(host: str, port: int) -> list[str]:
    """Every address of a name, sorted. Blocks. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return sorted({join_address(str(address[0]), port) for _, _, _, _, address in found})


class DnsSource:
    """Every address behind a name is a peer of its own. A failed look-up keeps the last addresses."""

    def __init__(self, name: str, resolve: Resolve = resolve) -> None:
        address = split_address(name)
        assert address is not None, "the settings were checked"
        self._host, self._port = address
        self._resolve = resolve
        self._known: tuple[str, ...] | None = None
        self._complaint = ""
        self._again = asyncio.Event()

    def look_again(self) -> None:
        self._again.set()

    async def watch(self, on_targets: OnTargets) -> None:
        while True:
            self._again.clear()
            await self._look(on_targets)
            # A name service is not asked for each of a thousand failures.
            await asyncio.sleep(RESOLVE_AT_LEAST_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(RESOLVE_S - RESOLVE_AT_LEAST_S):
                    await self._again.wait()

    async def _look(self, on_targets: OnTargets) -> None:
        try:
            found = tuple(await asyncio.to_thread(self._resolve, self._host, self._port))
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that no name service takes
            self._complain(f"{self._host} cannot be resolved: {error}")
            return
        self._complaint = ""
        if found != self._known:
            log.info("prefill nodes behind %s: %s", self._host, ", ".join(found))
            self._known = found
            on_targets(found)

    def _complain(self, complaint: str) -> None:
        if complaint != self._complaint:
            self._complaint = complaint
            log.warning("%s; the addresses known before stay (%d)", complaint, len(self._known or ()))


Stamp = tuple[int, int, int]


class FileSource:
    """A YAML file, `peers: [HOST:PORT, ...]`, looked at each second; a broken one leaves the last good list in force,
    and so does an empty one.

    It may be missing at first, which is an empty list; removed later, it is broken.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: Stamp | None = None
        self._known: tuple[str, ...] = ()
        self._is_missing = False

    def look_again(self) -> None:
        """It is looked at often enough."""

    async def watch(self, on_targets: OnTargets) -> None:
        while True:
            self.look(on_targets)
            await asyncio.sleep(LOOK_S)

    def look(self, on_targets: OnTargets) -> None:
        """Read the file if it is another one, or was written, since the last look."""
        stamp = _stamp(self._path)
        if stamp is None:
            self._on_missing()
            return
        if stamp == self._stamp:
            return
        self._stamp, self._is_missing = stamp, False
        try:
            found = parse_peers(self._path.read_text(encoding="utf-8"))
        except (PeerError, OSError, UnicodeDecodeError) as error:
            log.warning("%s: %s; the peers read before stay (%d)", self._path, error, len(self._known))
            return
        if found != self._known:
            log.info("prefill nodes in %s: %s", self._path, ", ".join(found) or "none")
            self._known = found
            on_targets(found)

    def _on_missing(self) -> None:
        if not self._is_missing:
            log.warning("%s is not there; the peers read before stay (%d)", self._path, len(self._known))
        self._stamp, self._is_missing = None, True


def _stamp(path: Path) -> Stamp | None:
    """Changes with every write and every replacement; None while there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino, found.st_size


def parse_peers(text: str) -> tuple[str, ...]:
    """The addresses in the text of a peers file, each once. Raises PeerError, which names the line."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        raise _wrong(error.problem_mark, str(error.problem)) from None
    except yaml.YAMLError as error:
        raise PeerError(" ".join(str(error).split())) from None
    if root is None:  # what an editor leaves for a moment that empties a file before it writes
        raise PeerError("is empty; `peers: []` is how it lists nobody")
    return tuple(dict.fromkeys(_address(node) for node in _entries(root)))


def _entries(root: yaml.Node) -> list[yaml.Node]:
    items = root.value if isinstance(root, yaml.MappingNode) else []
    if len(items) != 1 or items[0][0].value != "peers":
        raise _wrong(root.start_mark, "must hold `peers:` with a list of HOST:PORT, and nothing else")
    node = items[0][1]
    if not isinstance(node, yaml.SequenceNode):
        raise _wrong(node.start_mark, "peers must be a list of HOST:PORT, [] for nobody")
    return list(node.value)


def _address(node: yaml.Node) -> str:
    if not isinstance(node, yaml.ScalarNode) or split_address(node.value) is None:
        what = node.value if isinstance(node, yaml.ScalarNode) else "this entry"
        raise _wrong(node.start_mark, f"{what} must be HOST:PORT with a port of 1 to 65535")
    return str(node.value)


def _wrong(mark: yaml.Mark | None, what: str) -> PeerError:
    return PeerError(f"line {mark.line + 1}: {what}" if mark is not None else what)

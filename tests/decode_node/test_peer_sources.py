"""Addresses out of a name service and out of a file, and what is kept when either fails."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from decode_node import peer_sources
from decode_node.peer_sources import DnsSource, FileSource, PeerSources, parse_peers
from pdserve.errors import PeerError

LIMIT_S = 10.0
ONE, OTHER = "10.0.0.1:50052", "10.0.0.2:50052"


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_sources, "RESOLVE_S", 0.02)
    monkeypatch.setattr(peer_sources, "RESOLVE_AT_LEAST_S", 0.01)
    monkeypatch.setattr(peer_sources, "LOOK_S", 0.01)


# ---------------------------------------------------------------- the text of a file


def test_a_file_lists_addresses_each_once() -> None:
    assert parse_peers(f"peers: [{ONE}, '{OTHER}', {ONE}, '[::1]:9']\n") == (ONE, OTHER, "[::1]:9")
    assert parse_peers(f"peers:\n  - {ONE}\n  - {OTHER}\n") == (ONE, OTHER)


def test_a_file_may_list_nobody() -> None:
    assert parse_peers("# none yet\npeers: []\n") == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("peers:\n  - a:1\n  - b\n", "line 3: b must be HOST:PORT"),
        ("peers:\n  - a:70000\n", "line 2: a:70000 must be HOST:PORT with a port of 1 to 65535"),
        ("peers:\n  - a:1\n  - [b:2]\n", "line 3: this entry must be HOST:PORT"),
        ("", "is empty; `peers: []` is how it lists nobody"),
        ("# none yet\n", "is empty; `peers: []` is how it lists nobody"),
        ("peers:\n", "line 1: peers must be a list of HOST:PORT, [] for nobody"),
        ("# who\npeers: a:1\n", "line 2: peers must be a list of HOST:PORT"),
        ("nodes: [a:1]\n", "line 1: must hold `peers:`"),
        ("peers: [a:1]\nmore: 1\n", "line 1: must hold `peers:`"),
        ("peers: [a:1\n", "line 2: "),
        ("peers: \x01\n", "special characters"),
    ],
)
def test_a_broken_file_is_told_with_its_line(text: str, told: str) -> None:
    with pytest.raises(PeerError) as caught:
        parse_peers(text)
    assert told in caught.value.message


# ---------------------------------------------------------------- a file that changes


class Told:
    def __init__(self) -> None:
        self.lists: list[tuple[str, ...]] = []
        self._changed = asyncio.Event()

    def __call__(self, targets: tuple[str, ...]) -> None:
        self.lists.append(targets)
        self._changed.set()

    async def until(self, number: int) -> None:
        async with asyncio.timeout(LIMIT_S):
            while len(self.lists) < number:
                self._changed.clear()
                await self._changed.wait()


def replace_file(path: Path, text: str) -> None:
    """As careful writers do: another file under the same name."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def test_a_file_that_is_replaced_or_written_is_read_again_and_one_that_is_not_is_not(tmp_path: Path) -> None:
    path, told = tmp_path / "peers.yaml", Told()
    source = FileSource(path)
    source.look(told)
    assert told.lists == []  # it is not there yet, which is no fault
    replace_file(path, f"peers: [{ONE}]")
    source.look(told)
    source.look(told)
    replace_file(path, f"peers: [{OTHER}]")
    source.look(told)
    path.write_text(f"peers: [{ONE}, {OTHER}]")
    source.look(told)
    assert told.lists == [(ONE,), (OTHER,), (ONE, OTHER)]


def test_a_broken_or_removed_file_keeps_the_last_good_list_and_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, told = tmp_path / "peers.yaml", Told()
    source = FileSource(path)
    path.write_text(f"peers: [{ONE}]")
    source.look(told)
    replace_file(path, "peers:\n - no address")
    for _ in range(3):
        source.look(told)
    path.unlink()
    for _ in range(3):
        source.look(told)
    assert told.lists == [(ONE,)]
    assert [record.getMessage() for record in caplog.records] == [
        f"{path}: line 2: no address must be HOST:PORT with a port of 1 to 65535; the peers read before stay (1)",
        f"{path} is not there; the peers read before stay (1)",
    ]
    path.write_text(f"peers: [{OTHER}]")
    source.look(told)
    assert told.lists == [(ONE,), (OTHER,)]


@pytest.mark.parametrize("text", ["", "\n", "# who\n", "peers:\n"])
def test_a_file_that_is_emptied_before_it_is_written_drops_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    path, told = tmp_path / "peers.yaml", Told()
    source = FileSource(path)
    path.write_text(f"peers: [{ONE}]")
    source.look(told)
    path.write_text(text)
    source.look(told)
    assert told.lists == [(ONE,)]
    assert [
        (record.levelname, record.getMessage().endswith("the peers read before stay (1)")) for record in caplog.records
    ] == [("WARNING", True)]
    path.write_text("peers: []")
    source.look(told)
    assert told.lists == [(ONE,), ()]


# ---------------------------------------------------------------- a name service


async def test_every_address_behind_a_name_is_a_peer_and_changes_are_told() -> None:
    answers = [["10.0.0.1:50052"], ["10.0.0.1:50052"], ["10.0.0.1:50052", "10.0.0.2:50052"]]
    asked: list[tuple[str, int]] = []

    def resolve(host: str, port: int) -> list[str]:
        asked.append((host, port))
        return answers[min(len(asked), len(answers)) - 1]

    told = Told()
    watching = asyncio.create_task(DnsSource("prefill.local:50052", resolve).watch(told))
    await told.until(2)
    watching.cancel()
    assert told.lists == [(ONE,), (ONE, OTHER)]
    assert asked[0] == ("prefill.local", 50052)


async def test_a_name_that_cannot_be_resolved_any_more_keeps_its_addresses(caplog: pytest.LogCaptureFixture) -> None:
    num_asked, failed_twice = 0, asyncio.Event()
    loop = asyncio.get_running_loop()

    def resolve(host: str, port: int) -> list[str]:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            return [ONE]
        if num_asked > 3:
            loop.call_soon_threadsafe(failed_twice.set)
        raise socket.gaierror(-2, "Name or service not known")

    told = Told()
    watching = asyncio.create_task(DnsSource("prefill.local:50052", resolve).watch(told))
    await asyncio.wait_for(failed_twice.wait(), LIMIT_S)
    watching.cancel()
    assert told.lists == [(ONE,)]
    complaints = [r.getMessage() for r in caplog.records if "cannot be resolved" in r.getMessage()]
    assert len(complaints) == 1
    assert "the addresses known before stay (1)" in complaints[0]


async def test_a_failure_asks_the_name_service_before_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_sources, "RESOLVE_S", 1000.0)
    answers = iter([[ONE], [OTHER]])
    told = Told()
    source = DnsSource("prefill.local:50052", lambda host, port: next(answers))
    watching = asyncio.create_task(source.watch(told))
    await told.until(1)
    source.look_again()
    await told.until(2)
    watching.cancel()
    assert told.lists == [(ONE,), (OTHER,)]


def test_localhost_resolves_to_addresses_with_the_port() -> None:
    assert "127.0.0.1:50052" in peer_sources.resolve("localhost", 50052)


# ---------------------------------------------------------------- together


async def test_all_entries_make_one_list_without_repetition(tmp_path: Path) -> None:
    path, told = tmp_path / "peers.yaml", Told()
    path.write_text(f"peers: [{ONE}, {OTHER}]")
    sources = PeerSources([ONE, f"file://{path}", "dns:///localhost:7"])
    assert sources.static == (ONE,)
    watching = asyncio.create_task(sources.watch(told))
    await told.until(2)
    watching.cancel()
    assert told.lists[-1][:1] == (ONE,)
    assert set(told.lists[-1]) >= {ONE, OTHER, "127.0.0.1:7"}
    assert len(set(told.lists[-1])) == len(told.lists[-1])


async def test_addresses_alone_need_no_watching() -> None:
    told = Told()
    await PeerSources([ONE, OTHER]).watch(told)
    assert told.lists == []

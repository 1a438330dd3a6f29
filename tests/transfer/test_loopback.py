"""The loopback transport misbehaves exactly as told, so that everything above it can be tested in one process."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pytest

from pdserve.transfer.base import (
    Connect,
    Connected,
    ConnectFailed,
    CutPeer,
    PeerId,
    PeerLost,
    Read,
    ReadDone,
    ReadFailed,
    ReadId,
    ReadQuiet,
)
from pdserve.transfer.loopback import LoopbackNetwork, LoopbackTransport
from tests.transfer.conftest import PEER, Node, Pair, blocks, new_slab


@dataclass
class Bench:
    network: LoopbackNetwork
    pair: Pair
    now_s: float = 0.0

    @property
    def reader(self) -> Node:
        return self.pair.reader


@pytest.fixture
def bench() -> Bench:
    network = LoopbackNetwork()
    source, slab = new_slab(32, seed=3), new_slab(32)
    made: list[Bench] = []
    reader = LoopbackTransport(network, "reader", slab, clock=lambda: made[0].now_s, connect_timeout_s=10.0)
    pair = Pair(Node(source, LoopbackTransport(network, "source", source)), Node(slab, reader))
    made.append(Bench(network, pair))
    return made[0]


def test_a_slow_peer_delivers_after_so_many_polls(bench: Bench) -> None:
    bench.pair.connect()
    bench.network.slow("source", 3)
    bench.reader.read(1, blocks(1), blocks(2))
    for _ in range(3):
        bench.reader.poll()
        assert not bench.reader.slab.any()
    bench.reader.poll()
    assert bench.reader.of(ReadDone)
    assert np.array_equal(bench.reader.slab[2], bench.pair.source.slab[1])


def test_late_bytes_land_after_the_failure_was_told_and_before_quiet_is(bench: Bench) -> None:
    bench.pair.connect()
    bench.network.fail_late("source", 3)
    bench.reader.read(1, blocks(1), blocks(2))
    bench.reader.poll()
    assert bench.reader.of(ReadFailed) == [ReadFailed(ReadId(1), "told to fail", is_quiet=False)]
    assert not bench.reader.slab.any()
    assert bench.reader.transport.num_open_reads == 1
    bench.pair.drive(lambda: bench.reader.of(ReadQuiet))
    assert np.array_equal(bench.reader.slab[2], bench.pair.source.slab[1])
    assert not bench.reader.of(ReadDone)


def test_a_cut_keeps_late_bytes_out(bench: Bench) -> None:
    bench.pair.connect()
    bench.network.fail_late("source", 5)
    bench.reader.read(1, blocks(1), blocks(2))
    bench.reader.poll()
    bench.reader.transport.submit(CutPeer(PEER))
    bench.reader.poll()
    assert bench.reader.seen[-2:] == [ReadQuiet(ReadId(1)), PeerLost(PEER, "cut off")]
    for _ in range(10):
        bench.reader.poll()
    assert not bench.reader.slab.any()


def test_a_hanging_peer_is_waited_for_until_it_is_cut(bench: Bench) -> None:
    bench.pair.connect()
    bench.network.hang("source")
    bench.reader.read(1, blocks(1), blocks(2))
    bench.reader.seen.clear()
    for _ in range(100):
        bench.reader.poll()
    transport = bench.reader.transport
    assert isinstance(transport, LoopbackTransport)
    assert (bench.reader.seen, transport.num_open_reads, transport.num_open_handles) == ([], 1, 1)
    transport.submit(CutPeer(PEER))
    bench.reader.poll()
    assert (transport.num_open_reads, transport.num_open_handles) == (0, 0)
    assert bench.reader.seen == [ReadFailed(ReadId(1), "cut off", is_quiet=True), PeerLost(PEER, "cut off")]


def test_a_peer_that_wakes_up_delivers_what_was_open(bench: Bench) -> None:
    bench.pair.connect()
    bench.network.hang("source")
    bench.reader.read(1, blocks(1), blocks(2))
    bench.reader.poll()
    bench.network.heal("source")
    bench.reader.poll()
    assert bench.reader.of(ReadDone)


def test_a_dead_peer_is_lost_with_its_reads_quiet_and_no_byte_after(bench: Bench) -> None:
    bench.pair.connect()
    bench.network.slow("source", 2)
    bench.reader.read(1, blocks(1), blocks(2))
    bench.reader.poll()
    bench.network.kill("source")
    bench.reader.seen.clear()
    bench.reader.poll()
    assert bench.reader.seen == [
        ReadFailed(ReadId(1), "source is gone", is_quiet=True),
        PeerLost(PEER, "source is gone"),
    ]
    bench.reader.poll()
    assert not bench.reader.slab.any()


def test_a_connect_without_an_answer_fails_at_its_deadline(bench: Bench) -> None:
    bench.network.hang("source")
    bench.reader.transport.submit(Connect(PEER, bench.pair.source.transport.metadata()))
    bench.reader.poll()
    bench.now_s = 9.9
    bench.reader.poll()
    assert bench.reader.seen == []
    bench.now_s = 10.0
    bench.reader.poll()
    assert bench.reader.seen == [ConnectFailed(PEER, "no answer to the first read within 10 s")]


def test_a_peer_that_dies_while_it_is_connected_to_fails_the_connect(bench: Bench) -> None:
    bench.reader.transport.submit(Connect(PEER, bench.pair.source.transport.metadata()))
    bench.network.kill("source")
    bench.reader.poll()
    assert bench.reader.seen == [ConnectFailed(PEER, "the first read failed: source is gone")]


def test_one_stuck_peer_does_not_hold_up_another(bench: Bench) -> None:
    other = PeerId("other/0")
    slab = new_slab(32, seed=9)
    second = LoopbackTransport(bench.network, "second", slab)
    bench.pair.connect()
    bench.reader.transport.submit(Connect(other, second.metadata()))
    bench.reader.poll()
    bench.network.hang("source")
    bench.reader.read(1, blocks(*range(20)), blocks(*range(20)))
    bench.reader.transport.submit(Read(ReadId(2), other, blocks(4), blocks(30)))
    bench.reader.poll()
    bench.reader.poll()
    assert [done.read_id for done in bench.reader.of(ReadDone)] == [2]
    assert np.array_equal(bench.reader.slab[30], slab[4])


def test_a_transport_refuses_a_second_thread(bench: Bench) -> None:
    bench.pair.connect()
    refused: list[str] = []

    def poll() -> None:
        try:
            bench.reader.transport.events()
        except AssertionError as error:
            refused.append(str(error))

    thread = threading.Thread(target=poll)
    thread.start()
    thread.join()
    assert refused == ["a transport belongs to one thread"]


def test_two_transports_live_on_two_threads() -> None:
    network = LoopbackNetwork()
    slabs = {"a": new_slab(16, seed=1), "b": new_slab(16, seed=2)}
    transports = {name: LoopbackTransport(network, name, slab) for name, slab in slabs.items()}
    metadata = {name: transport.metadata() for name, transport in transports.items()}
    done: dict[str, int] = dict.fromkeys(slabs, 0)

    def pull(name: str, peer: str) -> None:
        transport = transports[name]
        transport.submit(Connect(PEER, metadata[peer]))
        while not any(isinstance(event, Connected) for event in transport.events()):
            pass
        for read_id in range(200):  # blocks 0 to 7 are read by the other thread, 8 to 15 are written by this one
            transport.submit(Read(ReadId(read_id), PEER, blocks(read_id % 8), blocks(8 + read_id % 8)))
            done[name] += sum(isinstance(event, ReadDone) for event in transport.events())
        while transport.num_open_reads:
            done[name] += sum(isinstance(event, ReadDone) for event in transport.events())

    threads = [threading.Thread(target=pull, args=names) for names in (("a", "b"), ("b", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert done == {"a": 200, "b": 200}
    assert np.array_equal(slabs["a"][8:], slabs["b"][:8])
    assert np.array_equal(slabs["b"][8:], slabs["a"][:8])

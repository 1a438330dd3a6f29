"""Head ranges between real processes, one a rank, by NIXL: over what one host uses, and over what two hosts use."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass
class Ranks:
    """Processes with one choice of transports; `close` leaves none behind."""

    tls: str
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *arguments: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.transfer.rank_processes", *map(str, arguments)],
            env=os.environ | ({"UCX_TLS": self.tls} if self.tls else {}),
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture(params=[pytest.param("", id="default", marks=pytest.mark.soak), pytest.param("tcp,self", id="tcp")])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    ranks = Ranks(request.param)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    ("source_tp", "reader_tp", "read_from"), [(2, 1, [[0, 1]]), (1, 2, [[0], [0]])], ids=["2_to_1", "1_to_2"]
)
def test_ranks_in_their_own_processes_get_the_bytes_of_their_heads_and_the_sources_end_well(
    ranks: Ranks, source_tp: int, reader_tp: int, read_from: list[list[int]]
) -> None:
    sources = [ranks.start("source", source_tp, rank) for rank in range(source_tp)]
    metadata = [source.stdout.readline().strip() for source in sources if source.stdout]
    readers = [ranks.start("reader", source_tp, reader_tp, rank, *metadata) for rank in range(reader_tp)]
    told = [json.loads(reader.communicate(timeout=60)[0].splitlines()[-1]) for reader in readers]
    assert told == [{"sources": from_ranks, "is_equal": True} for from_ranks in read_from]
    for source in sources:
        source.communicate(timeout=20)
    assert [process.returncode for process in ranks.started] == [0] * (source_tp + reader_tp)

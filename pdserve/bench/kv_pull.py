"""How fast KV is pulled: NIXL READs between two processes beside a plain copy of the same bytes, in one run.

    python -m pdserve.bench.kv_pull [--json FILE]

`default` lets UCX choose, which on one host copies straight between the processes; `tcp,self` is what two hosts do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pdserve.bench.kv_pull_nodes import PullTime
from pdserve.errors import TransferFailed
from pdserve.kv.layout import KVLayout

LAYOUTS = {
    "smollm2 float32": KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="float32"),
    "8B bfloat16": KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16"),
}
TRANSPORTS = ("default", "tcp,self")
BLOCK_COUNTS = (1, 8, 32)
SLAB_BLOCKS = 64
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class PullRow:
    """One line of the table. Rates in 10^9 bytes a second, medians of a few repeats."""

    layout: str
    transport: str
    num_blocks: int
    num_bytes: int
    read_gb_per_s: float
    copy_gb_per_s: float

    @property
    def read_share(self) -> float:
        """Of the plain copy's rate."""
        return self.read_gb_per_s / self.copy_gb_per_s


def measure_kv_pull(
    transports: Sequence[str] = TRANSPORTS, block_counts: Sequence[int] = BLOCK_COUNTS, slab_blocks: int = SLAB_BLOCKS
) -> list[PullRow]:
    """Every layout over every transport. Needs 3 × slab_blocks blocks of memory at a time (1.6 GB as given)."""
    return [
        row
        for name, layout in LAYOUTS.items()
        for transport in transports
        for row in _measure(name, layout.block_bytes, transport, block_counts, slab_blocks)
    ]


def _measure(name: str, block_bytes: int, transport: str, counts: Sequence[int], slab_blocks: int) -> list[PullRow]:
    """Both processes are new, as UCX chooses its transports once a process. Raises TransferFailed with their words."""
    numbers = [str(number) for number in (slab_blocks, block_bytes, *counts)]
    # env(1) adds to what the child inherits.
    setting = [] if transport == "default" else ["env", f"UCX_TLS={transport}"]
    command = [*setting, sys.executable, "-m", "pdserve.bench.kv_pull_nodes", "read", *numbers]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if ran.returncode != 0:
        raise TransferFailed(f"the pull over {transport} failed with {ran.returncode}: {ran.stderr.strip()[-500:]}")
    times = json.loads(ran.stdout.splitlines()[-1])
    return [_row(name, transport, PullTime(**time)) for time in times]


def _row(layout: str, transport: str, time: PullTime) -> PullRow:
    gigabytes = time.num_bytes / 1e9
    return PullRow(layout, transport, time.num_blocks, time.num_bytes, gigabytes / time.read_s, gigabytes / time.copy_s)


def print_rows(rows: Sequence[PullRow], console: Console) -> None:
    table = Table("layout", "UCX_TLS", "blocks", "MB", "READ GB/s", "copy GB/s", "share")
    for row in rows:
        table.add_row(
            row.layout,
            row.transport,
            str(row.num_blocks),
            f"{row.num_bytes / 1e6:.1f}",
            f"{row.read_gb_per_s:.2f}",
            f"{row.copy_gb_per_s:.2f}",
            f"{row.read_share:.0%}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the rows as JSON; - is standard output")
    given = parser.parse_args()
    rows = measure_kv_pull()
    print_rows(rows, Console(stderr=given.json == "-"))
    if given.json:
        encoded = json.dumps([asdict(row) for row in rows], indent=2)
        if given.json == "-":
            print(encoded)
        else:
            Path(given.json).write_text(encoded + "\n")


if __name__ == "__main__":
    main()

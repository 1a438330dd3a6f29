"""A node that is told to stop while it checks its weights does not check them all."""

from __future__ import annotations

from pathlib import Path

from pdserve.model.digests import DigestCache
from pdserve.model.revision import BLOCK_BYTES
from pdserve.node.serve import _revision
from pdserve.node.waiting import Signals


def write_model(directory: Path) -> Path:
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(bytes(4 * BLOCK_BYTES))
    return directory


async def test_weights_are_checked_to_the_end_unless_the_node_is_told_to_stop(tmp_path: Path) -> None:
    directory, stop, told = write_model(tmp_path), Signals(), list[tuple[int, int]]()

    def stop_after_two_blocks(step: str, done: int, total: int) -> None:
        told.append((done, total))
        if done >= 2 * BLOCK_BYTES:
            stop.first.set()

    digests = DigestCache(tmp_path / "digests")
    assert await _revision(directory, digests, stop, stop_after_two_blocks) is None
    assert told[-1][0] < told[-1][1]
    assert await _revision(directory, digests, Signals(), lambda step, done, total: None) is not None

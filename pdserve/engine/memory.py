"""How much memory a slab may take, and how many tokens fit in it."""

from __future__ import annotations

from pathlib import Path

from pdserve.errors import StartupError
from pdserve.kv.layout import KVLayout

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
_CGROUP_USED = Path("/sys/fs/cgroup/memory.current")


def available_bytes(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Memory that can be taken without swapping: the kernel's own estimate, within the control group's limit."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit = _CGROUP_LIMIT.read_text().strip() if _CGROUP_LIMIT.exists() else "max"
    if limit == "max":
        return available
    return min(available, int(limit) - int(_CGROUP_USED.read_text()))


def choose_num_blocks(
    layout: KVLayout, *, wanted: int | None, fraction: float, max_model_len: int, max_num_seqs: int, available: int
) -> int:
    """`wanted`, or what `fraction` of the available bytes holds, but no more than every slot's longest request needs.

    Raises StartupError when that does not fit, or is not enough for a single block.
    """
    most_useful = max_num_seqs * (layout.num_blocks_for(max_model_len) + 1)
    affordable = int(available * fraction) // layout.block_bytes
    num_blocks = min(affordable, most_useful) if wanted is None else wanted
    if num_blocks < 1:
        raise StartupError(
            f"{available / 2**30:.1f} GiB of memory are available and {fraction:.0%} of that is less than one KV block "
            f"of {layout.block_bytes / 2**20:.1f} MiB: free memory or raise --kv-memory-fraction"
        )
    if num_blocks * layout.block_bytes > available:
        raise StartupError(
            f"--num-kv-blocks {num_blocks} needs {num_blocks * layout.block_bytes / 2**30:.1f} GiB and "
            f"{available / 2**30:.1f} GiB are available: {max(affordable, 1)} blocks would fit"
        )
    return num_blocks

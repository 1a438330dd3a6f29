"""What the figures were measured on."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

from pdserve.config.environment import num_cores

# The instructions that kernels are chosen by, as /proc/cpuinfo calls them.
FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimddp", "i8mm", "sve")


@dataclass(frozen=True, slots=True)
class Machine:
    """cores: that this process may use. flags: of FLAGS, those it has."""

    cpu: str
    cores: int
    flags: tuple[str, ...]
    memory_gib: float

    def __str__(self) -> str:
        return f"{self.cpu}, {self.cores} cores, {' '.join(self.flags)}, {self.memory_gib:.0f} GiB"


def this_machine() -> Machine:
    cpu = _fields("/proc/cpuinfo")
    words = cpu.get("flags", cpu.get("Features", "")).split()
    memory_kib = int(_fields("/proc/meminfo")["MemTotal"].split()[0])
    name = cpu.get("model name", platform.machine())
    return Machine(name, num_cores(), tuple(flag for flag in FLAGS if flag in words), memory_kib / 2**20)


def _fields(path: str) -> dict[str, str]:
    lines = (line.partition(":") for line in Path(path).read_text().splitlines())
    return {name.strip(): value.strip() for name, _, value in lines}

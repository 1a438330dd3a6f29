"""The process environment. No other module reads it."""

from __future__ import annotations

import os
from pathlib import Path

PREFIX = "PDSERVE_"


def variable(field: str) -> str:
    """The environment variable of a field."""
    return PREFIX + field.upper()


def settings_given() -> dict[str, str]:
    """The PDSERVE_* variables that are set and not empty."""
    return {name: value for name, value in os.environ.items() if name.upper().startswith(PREFIX) and value}


def without_settings() -> dict[str, str]:
    """The environment for a child whose settings all come by its command line."""
    return {name: value for name, value in os.environ.items() if not name.upper().startswith(PREFIX)}


def omp_num_threads_text() -> str | None:
    """What OMP_NUM_THREADS says; None where it is unset or empty."""
    return os.environ.get("OMP_NUM_THREADS") or None


def omp_num_threads() -> int | None:
    """Threads of the outermost parallel region by OMP_NUM_THREADS (`4` or `4,2`); None if unset or not a number."""
    first = (omp_num_threads_text() or "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) >= 1 else None


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def torchrun_given() -> dict[str, str]:
    """What torchrun says of the nodes, by field; empty where it did not start this process.

    Its own store listens at MASTER_PORT, so the group meets at the port after that.
    """
    given = os.environ
    if "TORCHELASTIC_RUN_ID" not in given:
        return {}
    num_nodes, port = given.get("GROUP_WORLD_SIZE", "1"), given.get("MASTER_PORT", "")
    if num_nodes == "1" or not port.isdecimal():
        return {}
    address = f"{given.get('MASTER_ADDR', '')}:{int(port) + 1}"
    return {"nnodes": num_nodes, "node_rank": given.get("GROUP_RANK", "0"), "dist_init_addr": address}


def num_torchrun_processes() -> int:
    """That torchrun started on this machine, this one among them; 1 without it."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "1") if "TORCHELASTIC_RUN_ID" in os.environ else "1"
    return int(text) if text.isdecimal() else 1


def cache_dir() -> Path:
    """Where models and built kernels are kept: pdserve's folder in the user's cache. It may not exist yet."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pdserve"


def transport_setting() -> str | None:
    """UCX_TLS, which says what NIXL moves KV by; None leaves the choice to UCX."""
    return os.environ.get("UCX_TLS") or None

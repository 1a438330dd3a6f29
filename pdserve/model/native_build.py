"""The model's C kernels, built on first use with the machine's own compiler.

A library is kept in a cache directory under a name made of its source, headers, flags, compiler and CPU, so that it's
built once; several processes may build at once, the last rename wins. It uses the OpenMP runtime that torch has loaded,
as two of them in one process fight for the cores.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import subprocess
import tempfile
from pathlib import Path

BUILD_TIMEOUT_S = 120
# The sources, and what they include.
KERNELS = Path(__file__).parent / "kernels"


class NativeUnavailable(Exception):
    """A kernel cannot be built or does not cover the model; the text says why."""


def load_library(source: Path, symbol: str, cache_dir: Path, compiler: str, *extra_flags: str) -> ctypes.CDLL:
    """The library of `source`, which has the function `symbol`; built where needed. Raises NativeUnavailable."""
    path = build_library(source, cache_dir, compiler, *extra_flags)
    try:
        library = ctypes.CDLL(str(path))
        getattr(library, symbol)
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"{path} cannot be loaded, delete it to have it built again: {error}") from error
    return library


def build_library(source: Path, cache_dir: Path, compiler: str = "cc", *extra_flags: str) -> Path:
    """`source` as a shared library under `cache_dir`, built unless it is there. Raises NativeUnavailable.

    extra_flags come after ours, so that they win.
    """
    flags = (*compile_flags(), *extra_flags)
    digest = hashlib.sha256()
    texts = [path.read_bytes() for path in (source, *sorted(KERNELS.glob("*.h")))]
    for part in (*texts, " ".join((compiler, *flags)).encode(), _cpu().encode(), _openmp().encode()):
        digest.update(hashlib.sha256(part).digest())
    library = cache_dir / f"{digest.hexdigest()[:24]}.so"
    if library.exists():
        return library
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir) as scratch:
            built, linked = Path(scratch, "kernel.o"), Path(scratch, "kernel.so")
            _compile(compiler, *flags, f"-I{KERNELS}", "-c", "-o", str(built), str(source))
            # -fopenmp here would link the compiler's own OpenMP runtime.
            _compile(compiler, "-shared", "-o", str(linked), str(built), _openmp(), "-lm")
            os.replace(linked, library)
    except OSError as error:
        raise NativeUnavailable(f"cannot write to {cache_dir}: {error}") from error
    return library


def compile_flags() -> tuple[str, ...]:
    native = ("-march=native", "-mprefer-vector-width=512") if platform.machine() == "x86_64" else ("-mcpu=native",)
    return ("-O3", *native, "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-fPIC")


def _compile(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    except FileNotFoundError as error:
        raise NativeUnavailable(f"no C compiler: {command[0]!r} not found") from error
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["no message"])[-1]
        raise NativeUnavailable(f"{command[0]!r} ended with {error.returncode}: {last}") from error
    except subprocess.TimeoutExpired as error:
        raise NativeUnavailable(f"{command[0]!r} took over {BUILD_TIMEOUT_S} s") from error


def _cpu() -> str:
    """What -march=native depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


@functools.cache
def _openmp() -> str:
    """The OpenMP runtime this process has loaded (torch's), to link against; the compiler's own if none is found."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return "-lgomp"
    paths = (line.split(maxsplit=5)[-1] for line in lines)
    return next((path for path in paths if Path(path).name.startswith("libgomp")), "-lgomp")

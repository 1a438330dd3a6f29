"""`pdserve doctor`: what works on this machine, and for what doesn't, why and what to do."""

from __future__ import annotations

import importlib
import importlib.metadata
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from pdserve.commands.parsing import add_json, command_parser
from pdserve.commands.tables import write_json
from pdserve.config.environment import cache_dir, num_cores, omp_num_threads, transport_setting
from pdserve.engine.memory import available_bytes
from pdserve.kv.layout import KVLayout

DEFAULT_PORT = 50051
DEFAULT_MEMORY_FRACTION = 0.5
# The embedded model's, as `pdserve pull smollm2` makes it.
EMBEDDED_LAYOUT = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64)
COMPILERS = ("cc", "gcc", "clang")
COMPILE = "install gcc (without it torch computes, which is several times slower)"
GIB = 1024**3


class State(StrEnum):
    """fails: nodes can't run. warns: they run, with less."""

    WORKS = "works"
    WARNS = "warns"
    FAILS = "fails"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check saw. remedy: what to do about it; empty where it works."""

    check: str
    state: State
    found: str
    remedy: str = ""


def main(argv: list[str]) -> int:
    """A table of findings; 1 where something fails."""
    parser = command_parser("doctor", "", "Try what a node needs on this machine.", "pdserve doctor --json -")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PORT, metavar="N", help="port to try (default: %(default)s)"
    )
    add_json(parser)
    arguments = parser.parse_args(argv)
    findings = examine(arguments.port)
    if arguments.json:
        write_json(arguments.json, {"findings": [asdict(finding) for finding in findings]})
    if arguments.json != "-":
        show(findings)
    return int(any(finding.state is State.FAILS for finding in findings))


def examine(port: int) -> list[Finding]:
    """Every check, in the order a node would need them."""
    return [
        check_python(),
        check_torch(),
        check_threads(),
        check_nixl(),
        check_transport(),
        check_compiler(),
        check_weights(),
        check_model(),
        check_memory(available_bytes()),
        check_port(port),
    ]


def check_python() -> Finding:
    """Python's version; pip refuses an older one, so this tells rather than judges."""
    return Finding("python", State.WORKS, ".".join(map(str, sys.version_info[:3])))


def check_torch() -> Finding:
    """torch's version."""
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        return Finding("torch", State.FAILS, _reason(error), 'pip install "pdserve[node]"')
    return Finding("torch", State.WORKS, torch.__version__)


def check_threads() -> Finding:
    """How many threads a node computes with, and why."""
    cores, asked = num_cores(), omp_num_threads()
    if asked is None:
        return Finding("threads", State.WORKS, f"{cores} a node, one a core; a pair on this machine shares the cores")
    found = f"{asked} a node, as OMP_NUM_THREADS says, on {cores} cores"
    if asked > cores:
        return Finding("threads", State.WARNS, found, "unset it: threads that share a core wait for each other")
    return Finding("threads", State.WORKS, found)


def check_nixl() -> Finding:
    """An agent as nodes make it, with a small slab registered. In a process of its own, as its libraries can abort."""
    program = (
        "import numpy; from pdserve.transfer.nixl import NixlTransport; slab = numpy.zeros((4, 4096), numpy.uint8); "
        "t = NixlTransport('doctor', slab.ctypes.data, 4, 4096); print('metadata', len(t.metadata())); t.close()"
    )
    try:
        version = importlib.metadata.version("nixl-cu12")
    except importlib.metadata.PackageNotFoundError:
        return Finding("nixl", State.FAILS, "nixl-cu12 is not installed", 'pip install "pdserve[node]"')
    try:
        tried = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return Finding(
            "nixl", State.FAILS, f"{version}, but no agent within 60 s", "UCX_LOG_LEVEL=info shows what it tries"
        )
    said = next((line for line in tried.stdout.splitlines() if line.startswith("metadata ")), None)
    if tried.returncode != 0 or said is None:
        last = (tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"])[-1]
        return Finding(
            "nixl", State.FAILS, f"{version}, but an agent can't be made: {last}", "unset UCX_TLS, reinstall nixl-cu12"
        )
    return Finding("nixl", State.WORKS, f"{version}, an agent registers memory ({said.split()[1]} bytes of metadata)")


def check_transport() -> Finding:
    """What KV would be moved by."""
    setting = transport_setting()
    if setting is None:
        return Finding(
            "transport", State.WORKS, "UCX chooses: memory copies on one machine, sockets or RDMA between two"
        )
    if not {"tcp", "all"} & set(setting.split(",")) and not setting.startswith("^"):
        return Finding(
            "transport", State.WARNS, f"UCX_TLS={setting}", "add tcp to UCX_TLS, or other machines can't be reached"
        )
    return Finding("transport", State.WORKS, f"UCX_TLS={setting}")


def check_compiler() -> Finding:
    """A C compiler that makes a shared library with OpenMP, which the kernels are built with at first use."""
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        return Finding("C compiler", State.WARNS, "none found", COMPILE)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.c"
        source.write_text("#include <omp.h>\nint threads(void) { return omp_get_max_threads(); }\n")
        command = [
            compiler,
            "-O3",
            "-march=native",
            "-fopenmp",
            "-shared",
            "-fPIC",
            str(source),
            "-o",
            f"{folder}/probe.so",
        ]
        built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode != 0:
        first = (built.stderr.strip().splitlines() or ["no message"])[0]
        return Finding("C compiler", State.WARNS, f"{compiler} can't build with OpenMP: {first}", COMPILE)
    return Finding("C compiler", State.WORKS, f"{compiler} builds with OpenMP")


def check_weights() -> Finding:
    """What weights are kept as where `--quantization` is left open, and why."""
    from pdserve.model.native_build import NativeUnavailable
    from pdserve.model.quantized_linear import Kernel

    try:
        kernel = Kernel(cache_dir())
    except NativeUnavailable as error:
        return Finding("weights", State.WARNS, f"float32: the kernel for fewer bits can't be built: {error}", COMPILE)
    if not kernel.is_fast:
        return Finding("weights", State.WORKS, "float32: this CPU has no vector instructions for bytes")
    return Finding(
        "weights", State.WORKS, f"8 bits, or 4 where they were published so: the CPU has {kernel.instructions}"
    )


def check_model() -> Finding:
    """Whether the embedded model is in the cache."""
    from pdserve.model import cache, hub

    directory = hub.models_directory() / hub.SMOLLM2.directory
    if cache.is_intact(directory, hub.SMOLLM2.source, thorough=False):
        return Finding("embedded model", State.WORKS, f"smollm2 in {directory}")
    return Finding("embedded model", State.WARNS, "smollm2 is not in the cache", "pdserve pull smollm2")


def check_memory(available: int) -> Finding:
    """How many tokens of the embedded model's KV fit at the default settings."""
    layout = EMBEDDED_LAYOUT
    num_blocks = int(available * DEFAULT_MEMORY_FRACTION) // layout.block_bytes
    found = (
        f"{available / GIB:.1f} GiB available; half of it holds {num_blocks * layout.block_size:,} tokens of smollm2"
    )
    if num_blocks < 128:
        return Finding("memory", State.FAILS, found, "free some memory; one full context of smollm2 takes 128 blocks")
    return Finding("memory", State.WORKS, found)


def check_port(port: int) -> Finding:
    """Whether a node could listen there."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            return Finding("port", State.WARNS, f"127.0.0.1:{port}: {_reason(error)}", "use another --port")
    return Finding("port", State.WORKS, f"127.0.0.1:{port} is free")


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def show(findings: list[Finding]) -> None:
    """The table, and what to do."""
    from rich.console import Console
    from rich.table import Table

    colours = {State.WORKS: "green", State.WARNS: "yellow", State.FAILS: "red"}
    table = Table("check", "state", "found", "what to do")
    for finding in findings:
        colour = colours[finding.state]
        table.add_row(finding.check, f"[{colour}]{finding.state}[/{colour}]", finding.found, finding.remedy)
    Console().print(table)

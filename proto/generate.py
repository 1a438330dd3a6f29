"""Writes the gRPC stubs of proto/ into pdserve/v1 (or under another root, for the test that compares).

    python proto/generate.py [ROOT]

protoc's Python plugin writes no types for the gRPC half, so the .pyi beside each *_pb2_grpc.py comes from here: a stub
for channels, one for aio channels (a type only), and the function that registers a servicer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet, MethodDescriptorProto
from grpc_tools import protoc  # type: ignore[import-untyped]

PROTO_ROOT = Path(__file__).resolve().parent
GRPC_TYPES_HEADER = '"""Types of the gRPC half, written by proto/generate.py."""\n'


def main(root: Path) -> None:
    sources = sorted(str(path.relative_to(PROTO_ROOT)) for path in PROTO_ROOT.rglob("*.proto"))
    root.mkdir(parents=True, exist_ok=True)
    descriptors = root / "descriptors.bin"
    arguments = [
        "protoc",
        f"-I{PROTO_ROOT}",
        f"-I{resources.files('grpc_tools') / '_proto'}",
        f"--python_out={root}",
        f"--pyi_out={root}",
        f"--grpc_python_out={root}",
        f"--descriptor_set_out={descriptors}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc refused the files above")
    files = FileDescriptorSet.FromString(descriptors.read_bytes()).file
    descriptors.unlink()
    for file in files:
        target = root / file.name.replace(".proto", "_pb2_grpc.pyi")
        target.write_text("\n".join(grpc_types(file)) + "\n")


def grpc_types(file: FileDescriptorProto) -> Iterator[str]:
    module = Path(file.name).stem + "_pb2"
    yield GRPC_TYPES_HEADER
    yield "from typing import Any"
    yield ""
    yield "import grpc"
    yield "import grpc.aio"
    yield ""
    yield f"from {file.package} import {module}"
    for service in file.service:
        for name, package, channel in (
            (f"{service.name}Stub", "grpc", "grpc.Channel"),
            (f"{service.name}AsyncStub", "grpc.aio", "grpc.aio.Channel"),
        ):
            yield f"\nclass {name}:"
            yield f"    def __init__(self, channel: {channel}) -> None: ..."
            for method in service.method:
                yield f"    {method.name}: {package}.{callable_type(method, module)}"
        yield f"\nclass {service.name}Servicer: ..."
        arguments = "servicer: Any, server: grpc.Server | grpc.aio.Server"
        yield f"\ndef add_{service.name}Servicer_to_server({arguments}) -> None: ..."


def callable_type(method: MethodDescriptorProto, module: str) -> str:
    request = "Stream" if method.client_streaming else "Unary"
    response = "Stream" if method.server_streaming else "Unary"
    messages = ", ".join(f"{module}.{name.rpartition('.')[2]}" for name in (method.input_type, method.output_type))
    return f"{request}{response}MultiCallable[{messages}]"


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else PROTO_ROOT.parent)

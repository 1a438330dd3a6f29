import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_committed_stubs_are_what_the_protos_generate(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "proto" / "generate.py", tmp_path], check=True)
    generated = {path.name: path.read_text() for path in (tmp_path / "pdserve" / "v1").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "pdserve" / "v1").glob("*_pb2*")}
    assert generated == committed


def test_proto_folder_is_no_package() -> None:
    assert not list((ROOT / "proto").rglob("__init__.py")), "it would shadow proto-plus"

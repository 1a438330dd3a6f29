"""What an installed pdserve brings: four top-level names and one command."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
BUILD = "from hatchling.build import build_{kind}; print(build_{kind}({folder!r}))"


def build(kind: str, folder: Path) -> zipfile.ZipFile:
    program = BUILD.format(kind=kind, folder=str(folder))
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return zipfile.ZipFile(folder / ran.stdout.split()[-1])


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return build("wheel", tmp_path_factory.mktemp("wheel"))


def test_the_wheel_s_top_level_names_are_ours_alone(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {
        "pdserve",
        "prefill_node",
        "decode_node",
        "fused",
    }


def test_the_wheel_has_every_module_and_only_tracked_kinds_of_file(wheel: zipfile.ZipFile) -> None:
    inside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    written = {
        str(path.relative_to(ROOT))
        for top in ("pdserve", "prefill_node", "decode_node", "fused")
        for path in (ROOT / top).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == written


def test_the_command_is_pdserve(wheel: zipfile.ZipFile) -> None:
    entry_points = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert wheel.read(entry_points).decode().split() == ["[console_scripts]", "pdserve", "=", "pdserve.cli:main"]


def test_the_editable_install_is_a_plain_path_entry(tmp_path: Path) -> None:
    editable = build("editable", tmp_path)
    paths = [editable.read(name).decode().strip() for name in editable.namelist() if name.endswith(".pth")]
    assert paths == [str(ROOT)]


def test_make_installs_a_pinned_version_of_everything_within_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [project["dependencies"], *project["optional-dependencies"].values()]
    requirements = [Requirement(line) for group in asked for line in group]
    unmet = [str(r) for r in requirements if not r.specifier.contains(versions.get(canonicalize_name(r.name), "0"))]
    assert unmet == []

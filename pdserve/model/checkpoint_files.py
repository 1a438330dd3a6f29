"""Which files a checkpoint is made of. Without torch: a node's front looks at them too."""

from __future__ import annotations

import json
from pathlib import Path

from pdserve.errors import StartupError


def checkpoint_files(directory: Path) -> list[Path]:
    """The safetensors files that make up the checkpoint, sorted by name. Raises StartupError if any is missing."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if not index.exists():
        if not single.exists():
            raise StartupError(f"{directory} has no model.safetensors (nor an index of shards); fetch the model again")
        return [single]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StartupError(f"{index} cannot be read: {error!r}; fetch the model again") from error
    absent = [name for name in names if not (directory / name).exists()]
    if absent:
        raise StartupError(f"{directory} lacks {', '.join(absent)}; fetch the model again")
    return [directory / name for name in names]

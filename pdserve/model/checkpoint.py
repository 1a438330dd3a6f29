"""The safetensors files of a model directory: which there are, and their tensors by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pdserve.errors import StartupError
from pdserve.model.checkpoint_files import checkpoint_files
from pdserve.model.progress import Progress

STEP = "loading weights"


class Checkpoint:
    """The tensors of all files by name, checked against the names and shapes the config calls for."""

    def __init__(self, directory: Path, expected: Mapping[str, tuple[int, ...]], progress: Progress) -> None:
        self._expected = expected
        self._progress = progress
        self._num_done = 0
        self._directory = directory
        self._files: dict[str, Any] = {}
        for path in checkpoint_files(directory):
            try:
                file: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise StartupError(f"{path} cannot be read: {error}; fetch the model again") from error
            self._files |= dict.fromkeys(file.keys(), file)
        self._refuse("lacks tensors", expected.keys() - self._files.keys())
        self._refuse("has unexpected tensors", {n for n in self._files.keys() - expected.keys() if not _is_derived(n)})

    def _refuse(self, fault: str, names: set[str]) -> None:
        if names:
            some = ", ".join(sorted(names)[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            raise StartupError(
                f"{self._directory} {fault}: {some}; they do not fit its config.json, fetch the model again"
            )

    def take(self, name: str, rows: range | None = None, columns: range | None = None) -> Tensor:
        """The tensor as float32, or the slice of it that rows (its first axis) and columns (its second) say.

        Only the slice is read. Raises StartupError if the whole is not what the config calls for.
        """
        file = self._files[name]
        stored = file.get_slice(name)
        shape = tuple(stored.get_shape())
        fits = shape == self._expected[name]
        tensor: Tensor = stored[_index(shape, rows, columns)] if fits else file.get_tensor(name)
        if not fits or not tensor.is_floating_point():
            raise StartupError(
                f"{self._directory}: {name} is {list(shape)} of {str(tensor.dtype).removeprefix('torch.')}, its "
                f"config.json calls for floating point {list(self._expected[name])}; use the unquantized model"
            )
        self._count(1)
        # Copied: safetensors maps the file, and whoever overwrites it would change the model that is being served.
        return tensor.to(torch.float32, copy=True)

    def leave(self, names: Sequence[str]) -> None:
        """Another rank reads them: they count as done, and are not read."""
        self._count(len(names))

    def _count(self, num_tensors: int) -> None:
        self._num_done += num_tensors
        self._progress(STEP, self._num_done, len(self._expected))


def _index(shape: tuple[int, ...], *held: range | None) -> tuple[slice, ...]:
    """held: of the first axes; None is all of it."""
    ranges = [range(size) if part is None else part for size, part in zip(shape, held, strict=False)]
    return tuple(slice(part.start, part.stop) for part in ranges)


def _is_derived(name: str) -> bool:
    """Tensors that some checkpoints store though they follow from others: rope tables, a tied head."""
    return name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"

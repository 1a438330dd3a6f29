"""The figures of a table as JSON, for programs."""

from __future__ import annotations

import json
from pathlib import Path

from pdserve.errors import StartupError


def write_json(destination: str, figures: object) -> None:
    """Write `figures` to a file, or to standard output where destination is `-`. Raises StartupError if it can't."""
    text = json.dumps(figures, indent=2, ensure_ascii=False)
    if destination == "-":
        print(text)
        return
    try:
        Path(destination).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise StartupError(f"--json {destination} can't be written ({error.strerror}); check the path") from None

"""An empty figure to draw on, and the file it becomes; no window, no display."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.errors import StartupError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DOTS_PER_INCH = 100

# Colours that stay apart for colour-blind readers too (Paul Tol, "bright").
BLUE, RED, GREEN, YELLOW, CYAN, PURPLE, GREY = (
    *("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377"),
    "#bbbbbb",
)


def require_matplotlib(flag: str = "a picture") -> None:
    """Raises StartupError with the remedy where it isn't installed. flag: what needs it."""
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise StartupError(f'{flag} needs matplotlib; pip install "pdserve[bench]"') from None


def figure(width_in: float, height_in: float) -> Figure:
    """A figure of that many inches. Raises StartupError without matplotlib."""
    require_matplotlib()
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), dpi=DOTS_PER_INCH, layout="constrained", facecolor="white")


def save(drawn: Figure, path: str | Path) -> None:
    """Write a PNG that is the same, byte for byte, for the same data. Raises StartupError if it can't."""
    try:
        drawn.savefig(path, format="png", metadata={"Software": None})
    except OSError as error:
        raise StartupError(f"{path} can't be written ({error.strerror}); check the path") from None

"""`pdserve serve MODEL`: becomes the node's own program, once the settings are known to be right."""

from __future__ import annotations

import os
import sys

from pdserve.config import ServerArgs
from pdserve.node_process import program


def main(argv: list[str]) -> int:
    """Replace this process by the node's."""
    args = ServerArgs.from_command_line(argv)
    # The node reads environment and file again by itself; the same words give the same settings.
    os.execv(sys.executable, program(args.role, argv))

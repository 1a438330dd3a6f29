"""The start of every node's program: settings first, then logging, then the node; faults of start-up on one line."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from pdserve.config import Role, ServerArgs
from pdserve.errors import StartupError
from pdserve.telemetry import configure_logging

STARTUP_FAILED = 2
INTERRUPTED = 130


def launch(role: Role, run: Callable[[ServerArgs], None], argv: Sequence[str] | None = None) -> int:
    """Run a node to its end with the settings of this launch; the process's exit status.

    run: builds the node and serves until told to stop.
    """
    try:
        args = ServerArgs.from_command_line(argv, role)
        configure_logging(args.log_level, args.log_format, f"{role}:{args.port}")
        run(args)
    except StartupError as error:
        print(f"{role} node: {error.message}", file=sys.stderr)
        return STARTUP_FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0

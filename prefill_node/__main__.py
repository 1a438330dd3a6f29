"""`python -m prefill_node MODEL [flags]`: one prefill node in the foreground."""

from __future__ import annotations

import sys

from pdserve.config import Role, ServerArgs
from pdserve.startup import launch


def run(args: ServerArgs) -> None:
    """Serve until stopped."""
    # Here, as it imports a node: a wrong flag is told at once.
    from prefill_node import node

    node.run(args)


if __name__ == "__main__":
    sys.exit(launch(Role.PREFILL, run))

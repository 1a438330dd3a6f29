"""`python -m fused MODEL [flags]`: one fused node in the foreground."""

from __future__ import annotations

import sys

from pdserve.config import Role, ServerArgs
from pdserve.startup import launch


def run(args: ServerArgs) -> None:
    """Serve until stopped."""
    # Here, as it imports a node: a wrong flag is told at once.
    from fused import node

    node.run(args)


if __name__ == "__main__":
    sys.exit(launch(Role.FUSED, run))

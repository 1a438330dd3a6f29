"""The life of a node, whatever it serves: its rank, its gRPC server, its signals."""

from pdserve.node.serve import run
from pdserve.node.site import Build, Parts, Site

__all__ = ["Build", "Parts", "Site", "run"]

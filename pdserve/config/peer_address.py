"""How a prefill node is named: an address, a name with several addresses behind it, or a file that lists addresses."""

from __future__ import annotations

DNS, FILE = "dns:///", "file:///"


def split_address(address: str) -> tuple[str, int] | None:
    """(host, port) of HOST:PORT, an IPv6 host in brackets or not; None for anything else."""
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and 1 <= int(port) <= 65535) or "/" in host:
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


def join_address(host: str, port: int) -> str:
    """HOST:PORT as gRPC writes it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def dns_name(peer: str) -> str | None:
    """NAME:PORT of dns:///NAME:PORT; None for another kind of peer."""
    return peer.removeprefix(DNS) if peer.startswith(DNS) else None


def file_path(peer: str) -> str | None:
    """The path of file:///PATH; None for another kind of peer."""
    return "/" + peer.removeprefix(FILE) if peer.startswith(FILE) else None


def wrong_with_peer(peer: str) -> str | None:
    """What is wrong with one entry of --prefill-peers, None if nothing."""
    if not peer:
        return "an empty word names no node; give HOST:PORT, or leave the flag out"
    if (path := file_path(peer)) is not None:
        return "must be file:///PATH with the absolute path of a file" if path.endswith("/") else None
    if peer.startswith("file:"):
        return "must be file:///PATH, with three slashes"
    if (name := dns_name(peer)) is not None:
        return None if split_address(name) else "must be dns:///NAME:PORT with a port of 1 to 65535"
    if peer.startswith("dns:"):
        return "must be dns:///NAME:PORT, with three slashes"
    if split_address(peer) is None:
        return "must be HOST:PORT with a port of 1 to 65535"
    return None

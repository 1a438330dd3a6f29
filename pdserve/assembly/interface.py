"""Which network interface has an address of this machine; torch's gloo is told interfaces, not addresses."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

_SIOCGIFADDR = 0x8915  # netdevice(7)
_NAME_BYTES, _ADDRESS_AT = 16, 20


def interface_of(host: str) -> str | None:
    """None where no interface has it first, or it is no IPv4 address: gloo then goes by the machine's name."""
    address = _resolved(host)
    if address is None:
        return None
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    return next((name for _, name in socket.if_nameindex() if _address_of(name) == address), None)


def _resolved(host: str) -> str | None:
    try:
        return socket.gethostbyname(host)
    except OSError:
        return None


def _address_of(interface: str) -> str | None:
    request = struct.pack(f"{_NAME_BYTES}s{_NAME_BYTES}x", interface.encode()[: _NAME_BYTES - 1])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError:
            return None
    return socket.inet_ntoa(answer[_ADDRESS_AT : _ADDRESS_AT + 4])

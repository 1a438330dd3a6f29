"""The interface that an address belongs to."""

from __future__ import annotations

import pytest

from pdserve.assembly.interface import interface_of


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.8.7", "localhost"])
def test_loopback_is_lo(host: str) -> None:
    assert interface_of(host) == "lo"


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "::1"])
def test_an_address_that_no_interface_has_is_left_to_the_machine_s_name(host: str) -> None:
    assert interface_of(host) is None

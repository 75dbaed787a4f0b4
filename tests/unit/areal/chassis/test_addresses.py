"""Addresses that processes listen on."""

from __future__ import annotations

import socket

import pytest

from areal.chassis.service import check_address, split_address
from areal.errors import ConfigError
from areal.security import Security


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("0.0.0.0:50051", ("0.0.0.0", 50051)),
        ("host:1", ("host", 1)),
        ("[::]:9100", ("::", 9100)),
        ("[::1]:0", ("::1", 0)),
        ("[fe80::1%eth0]:80", ("fe80::1%eth0", 80)),
    ],
)
def test_address_when_it_is_split_then_host_and_port(address: str, expected: object) -> None:
    assert split_address(address, "--listen") == expected


@pytest.mark.parametrize("address", ["", "host", ":1", "host:x", "host:65536", "[]:1", "host:²"])
def test_address_when_it_is_none_then_refused_by_name(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--listen '.*': expected host:port"):
        split_address(address, "--listen")


@pytest.mark.parametrize("address", ["::1:80", "::", "fe80::1:2"])
def test_address_when_an_ipv6_host_has_no_brackets_then_it_is_said(address: str) -> None:
    with pytest.raises(ConfigError, match=r"expected (\[address\]:port|host:port)"):
        split_address(address, "--listen")


def test_address_when_it_is_ipv6_then_it_is_tried_as_such() -> None:
    try:
        taken = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError:
        pytest.skip("this machine has no IPv6")
    with taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot listen there"):
            check_address(f"[::1]:{port}", "--listen", Security())
    check_address(f"[::1]:{port}", "--listen", Security())

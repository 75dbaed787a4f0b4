"""Addresses of servers on this machine, which may have IPv4, IPv6, or both."""

from __future__ import annotations

import socket

_V4, _V6 = "127.0.0.1", "::1"


def loopback() -> str:
    """Returns the address at which this machine reaches itself: ::1 if it has no IPv4."""
    try:
        with socket.socket(socket.AF_INET) as probe:
            probe.bind((_V4, 0))
    except OSError:
        return _V6 if socket.has_ipv6 else _V4
    return _V4


def everywhere() -> str:
    """Returns the address that stands for all of this machine's, for a server to listen on."""
    return "0.0.0.0" if loopback() == _V4 else "::"  # noqa: S104 - see Security.check_bind


def join_address(host: str, port: int | str) -> str:
    """Returns `host:port`, an IPv6 address in brackets.

    Example:
        >>> join_address("::1", 80)
        '[::1]:80'
    """
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"

"""Addresses as configuration names them: of one server, or of several replicas."""

from __future__ import annotations

import socket
from urllib.parse import quote

from areal.addresses import join_address
from areal.errors import ConfigError


def split_host(address: str) -> tuple[str, int]:
    """Splits `host:port`, an IPv6 host in brackets; raises ConfigError.

    Example:
        >>> split_host("[::1]:80")
        ('::1', 80)
    """
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{address!r}: expected [address]:port, since this is IPv6")
    if not host or not (port.isascii() and port.isdecimal()) or int(port) > 65535:
        raise ConfigError(f"{address!r}: expected host:port")
    return host, int(port)


def target_of(addresses: str) -> tuple[str, str]:
    """Returns gRPC's target for replicas at several addresses, and the first of these.

    Args:
        addresses: `host:port,host:port`, all of IPv4 or all of IPv6. gRPC takes only numbers in a
            list, so names are looked up here, once.

    Raises:
        ConfigError: One is not host:port, or they have no address of one kind.
    """
    places = [split_host(each.strip()) for each in addresses.split(",")]
    failed = ""
    for family, scheme in ((socket.AF_INET, "ipv4"), (socket.AF_INET6, "ipv6")):
        try:
            found = [
                str(socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0][4][0])
                for host, port in places
            ]
        except (OSError, UnicodeError) as error:
            failed = failed or str(error)
            continue
        joined = [join_address(host, port) for host, (_, port) in zip(found, places, strict=True)]
        return f"{scheme}:{quote(','.join(joined), safe=',:')}", join_address(*places[0])
    raise ConfigError(
        f"{addresses!r}: expected addresses of which all are of IPv4, or all of IPv6 ({failed})"
    )

"""Where inference servers come from: the entries of `endpoints.inference`, parsed.

| entry                                 | servers                                            |
|---------------------------------------|----------------------------------------------------|
| http://HOST:PORT                      | that one                                           |
| dns://NAME:PORT                       | one per A and AAAA record of the name              |
| dns://NAMESERVER[:53]/NAME:PORT       | the same, asking that nameserver                   |
| kubernetes://NAMESPACE/SERVICE[:PORT] | the addresses of the Service, ready or not         |
| kubernetes:///SERVICE[:PORT]          | the same in this pod's own namespace               |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from areal.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?\.?")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_EXPECTED = {
    "dns": "dns://NAME:PORT or dns://NAMESERVER/NAME:PORT",
    "kubernetes": "kubernetes://NAMESPACE/SERVICE[:PORT] or kubernetes:///SERVICE[:PORT]",
}


class SourceKind(StrEnum):
    """How an entry of `endpoints.inference` finds servers."""

    STATIC = "static"
    DNS = "dns"
    KUBERNETES = "kubernetes"


@dataclass(frozen=True)
class ServerSource:
    """One entry of `endpoints.inference`.

    Example:
        >>> parse_source("kubernetes:///sglang:30000").name
        'sglang'
    """

    entry: str
    """The entry of `endpoints.inference` that was parsed."""
    kind: SourceKind
    name: str
    """The DNS name, the Service, or the url."""
    port: int = 0
    """Port of the servers; 0: the port of the Service."""
    namespace: str = ""
    """Namespace of the Service; empty: this pod's own."""
    nameserver: str = ""
    """The nameserver, host or host:port; empty: the system's."""


def parse_source(entry: str) -> ServerSource:
    """Reads one entry.

    Raises:
        ConfigError: One line with the entry and what was expected.
    """
    scheme, separator, rest = entry.strip().partition("://")
    if not separator or scheme not in ("http", "https", *_EXPECTED):
        raise _refuse(entry, "http://HOST:PORT, dns://NAME:PORT or kubernetes://NAMESPACE/SERVICE")
    if scheme in ("http", "https"):
        try:
            parts = urlsplit(entry.strip())
            bad = not parts.hostname or bool(parts.path.strip("/") or parts.query or parts.username)
            bad = bad or parts.port == 0
        except ValueError:
            bad = True
        if bad:
            raise _refuse(entry, "http://HOST:PORT")
        return ServerSource(entry, SourceKind.STATIC, entry.strip())
    authority, slash, target = rest.rpartition("/")
    name, colon, digits = target.partition(":")
    port = int(digits) if digits.isdigit() and len(digits) < 6 else 0
    if (colon or scheme == "dns") and not 0 < port < 65536:
        raise _refuse(entry, _EXPECTED[scheme])
    if scheme == "dns":
        if not _NAME.fullmatch(name) or bool(slash) != bool(authority):
            raise _refuse(entry, _EXPECTED[scheme])
        return ServerSource(entry, SourceKind.DNS, name, port, nameserver=authority)
    if not slash or not _LABEL.fullmatch(name) or not _LABEL.fullmatch(authority or "own"):
        raise _refuse(entry, _EXPECTED[scheme])
    return ServerSource(entry, SourceKind.KUBERNETES, name, port, namespace=authority)


def _refuse(entry: str, expected: str) -> ConfigError:
    return ConfigError(f"endpoints.inference {entry!r}: expected {expected}")

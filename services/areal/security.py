"""Who may call: a bearer token, mutual TLS between the services, and where a server may listen.

Secrets are read from files or from the environment, never from the command line or the experiment
file: what is written down everywhere (config.yaml, stack.json, logs, `ps`) names files only.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from areal.errors import ConfigError

TOKEN_VARIABLE = "AREAL_TOKEN"  # noqa: S105 - a name, not a secret
REDIS_VARIABLE = "AREAL_REDIS_PASSWORD"
NATS_VARIABLE = "AREAL_NATS_TOKEN"
SECRET_VARIABLES = (TOKEN_VARIABLE, REDIS_VARIABLE, NATS_VARIABLE)

MIN_TOKEN_LENGTH = 16
UNAUTHENTICATED = (
    "this endpoint asks for a bearer token, and the request carried none or another one "
    "(security.token_file or AREAL_TOKEN; `areal token` prints that of a local stack)"
)

# Fits a header, a URL, redis.conf and nats.conf without surprises.
_PRINTABLE = re.compile(r"[\x21-\x7e]+")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")  # what RFC 6750 allows
_USERINFO = re.compile(r"(?<=://)[^\s\"'@]*@")
_BEARER = re.compile(r"(?i)\b(bearer )[A-Za-z0-9._~+/=-]{16,}")


@dataclass
class SecurityConfig:
    """Who may call. Every secret is in a file (or a variable); none of them is in this file."""

    token_file: str = ""
    """File with the bearer token that every gRPC and HTTP endpoint asks for (16 characters or
    more); empty: the variable AREAL_TOKEN; neither: `areal run` and `areal up` make one for each
    start, and a service that is started by itself asks for none."""
    redis_password_file: str = ""
    """Password of Redis, for an endpoints.redis that has none; empty: AREAL_REDIS_PASSWORD."""
    nats_token_file: str = ""
    """Token of NATS, for an endpoints.nats without user; empty: AREAL_NATS_TOKEN."""
    tls_cert: str = ""
    """PEM certificate of this process, for mutual TLS on gRPC: set tls_key and tls_ca too. Its
    names must cover the hosts in `endpoints`."""
    tls_key: str = ""
    """PEM private key of tls_cert."""
    tls_ca: str = ""
    """PEM certificates of the authorities that sign every peer's certificate."""
    allow_insecure_bind: bool = False
    """Listen on an address that other machines reach although there is no token."""


@dataclass(frozen=True)
class Tls:
    """PEM contents for mutual TLS."""

    certificate: bytes
    key: bytes = field(repr=False)
    authorities: bytes


@dataclass(frozen=True)
class Security:
    """The secrets themselves, as one process holds them; the default is none at all.

    Example:
        >>> Security(token="0123456789abcdef").admits("Bearer 0123456789abcdef")
        True
    """

    token: str = field(default="", repr=False)
    redis_password: str = field(default="", repr=False)
    nats_token: str = field(default="", repr=False)
    tls: Tls | None = None
    allow_insecure_bind: bool = False

    @classmethod
    def load(cls, config: SecurityConfig, environment: Mapping[str, str] = os.environ) -> Security:
        """Reads files and variables.

        Raises:
            ConfigError: A file cannot be read, or what it holds is no token.
        """
        token = _secret(config.token_file, "token_file", TOKEN_VARIABLE, environment)
        if token and (len(token) < MIN_TOKEN_LENGTH or not _TOKEN.fullmatch(token)):
            key = "security.token_file" if config.token_file else TOKEN_VARIABLE
            raise ConfigError(
                f"{key}: a token of {len(token)} characters, expected {MIN_TOKEN_LENGTH} or more "
                "of letters, digits and ._~+/=-"
            )
        return cls(
            token=token,
            redis_password=_secret(
                config.redis_password_file, "redis_password_file", REDIS_VARIABLE, environment
            ),
            nats_token=_secret(
                config.nats_token_file, "nats_token_file", NATS_VARIABLE, environment
            ),
            tls=_tls(config),
            allow_insecure_bind=config.allow_insecure_bind,
        )

    def admits(self, authorization: str | bytes | None) -> bool:
        """Whether an Authorization header carries the token; without a token everything passes.

        Takes the same time wherever a wrong token differs from ours.
        """
        if not self.token:
            return True
        given = authorization or b""
        given = given.encode(errors="replace") if isinstance(given, str) else given
        scheme, _, token = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token, self.token.encode())

    def foreign(self, header: Callable[[str], str | None]) -> str:
        """Why an HTTP request may be a foreign web page's; "" when it is not.

        Without a token only this machine reaches us, and a browser on it runs pages of strangers.
        It says whose page asks, and the name that it looked up: a page may have had its own name
        resolved to our address. A page does not know a token, so with one nothing is asked.

        Args:
            header: The request's headers by lower-case name; None: absent.
        """
        if self.token or self.allow_insecure_bind:
            return ""
        host = header("host") or ""
        name = urlsplit(f"//{host}").hostname or ""
        if host and name != "localhost" and not _is_address(name):
            return f"Host {host[:80]!r}: expected localhost or an address, as there is no token"
        origin = header("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return f"Origin {origin[:80]!r}: expected our own pages, as there is no token"
        if (site := header("sec-fetch-site") or "none") not in ("none", "same-origin"):
            return f"Sec-Fetch-Site {site[:20]!r}: expected our own pages, as there is no token"
        return ""

    def headers(self) -> dict[str, str]:
        """What an HTTP client sends along."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def check_bind(self, host: str, key: str) -> None:
        """Refuses an address that others reach while anybody could call.

        Raises:
            ConfigError: Names `key` and the ways out.
        """
        if self.token or self.allow_insecure_bind or is_loopback(host):
            return
        raise ConfigError(
            f"{key} {host!r}: other machines reach this address and there is no token; expected "
            "security.token_file or AREAL_TOKEN, a loopback address, or "
            "security.allow_insecure_bind=true"
        )


def _is_address(name: str) -> bool:
    """Whether a host is written as an IP address, which no name server had a say in."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that listens on `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    # An empty host means every interface, whatever it resolves to.
    return bool(host) and all(ipaddress.ip_address(each[4][0]).is_loopback for each in found)


def without_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for children that read files, or that must not know."""
    return {k: v for k, v in environment.items() if k not in SECRET_VARIABLES}


def redact(text: str) -> str:
    """Hides passwords in URLs and bearer tokens: the last net under everything that is logged."""
    if "@" in text:
        text = _USERINFO.sub("***@", text)
    return _BEARER.sub(r"\1***", text)


def _secret(file: str, key: str, variable: str, environment: Mapping[str, str]) -> str:
    if not file:
        name, value = variable, environment.get(variable, "")
        if not value:
            return ""
    else:
        name, value = f"security.{key} {file!r}", _read(file, key).decode(errors="replace").strip()
    if not _PRINTABLE.fullmatch(value):
        raise ConfigError(f"{name}: expected one line of printable characters without spaces")
    return value


def _tls(config: SecurityConfig) -> Tls | None:
    keys = ("tls_cert", "tls_key", "tls_ca")
    missing = [key for key in keys if not getattr(config, key)]
    if len(missing) == len(keys):
        return None
    if missing:
        raise ConfigError(
            f"security.{missing[0]} '': expected a PEM file; mutual TLS takes tls_cert, tls_key "
            "and tls_ca together"
        )
    certificate, private, authorities = (_pem(getattr(config, key), key) for key in keys)
    return Tls(certificate, private, authorities)


def _pem(file: str, key: str) -> bytes:
    content = _read(file, key)
    if b"-----BEGIN " not in content:
        raise ConfigError(f"security.{key} {file!r}: expected PEM")
    return content


def _read(file: str, key: str) -> bytes:
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"security.{key} {file!r}: {error.strerror or error}") from None

"""Access control: a bearer token, mutual TLS between services, and where a server may listen.

Secrets are read from files or from the environment, never from the command line or the experiment
file, because config.yaml, stack.json, logs and `ps` are widely visible; these only name files.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from areal.errors import ConfigError

TOKEN_VARIABLE = "AREAL_TOKEN"  # noqa: S105 - a name, not a secret
PREVIOUS_VARIABLE = "AREAL_TOKEN_PREVIOUS"
REDIS_VARIABLE = "AREAL_REDIS_PASSWORD"
NATS_VARIABLE = "AREAL_NATS_TOKEN"
FOLDER_VARIABLE = "AREAL_SECURITY_DIR"
SECRET_VARIABLES = (TOKEN_VARIABLE, PREVIOUS_VARIABLE, REDIS_VARIABLE, NATS_VARIABLE)

_FILES = {
    "token": TOKEN_VARIABLE,
    "token-previous": PREVIOUS_VARIABLE,
    "redis-password": REDIS_VARIABLE,
    "nats-token": NATS_VARIABLE,
}

MIN_TOKEN_LENGTH = 16
_LOOK_S = 1.0
"""Seconds between two readings of the files, so that wrong tokens cannot keep a process reading."""
UNAUTHENTICATED = (
    "this endpoint requires a bearer token; the request had none, or a wrong one "
    "(set security.dir or AREAL_TOKEN; `areal token` prints the token of a local stack)"
)

# Fits a header, a URL, redis.conf and nats.conf without surprises.
_PRINTABLE = re.compile(r"[\x21-\x7e]+")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")  # what RFC 6750 allows
# A password may hold any character, even those that a URL should encode: "@" too. Addresses of
# models and of folders in object stores have none, but an "@" before the revision.
_USERINFO = re.compile(
    r"(?<=://)(?<!hf://)(?<!s3://)(?<!gs://)(?<!az://)[^\s\"'@]*@(?:[^\s\"'@,/]*@)*"
)
_BEARER = re.compile(r"(?i)\b(bearer )[A-Za-z0-9._~+/=-]{16,}")


@dataclass
class SecurityConfig:
    """Access control. Secrets are in files or the environment, never in the experiment file."""

    dir: str = ""
    """Folder of the files with secrets. `token` contains the bearer token of all gRPC and HTTP
    endpoints (16 characters or more). While you rotate it, `token-previous` contains the one
    before: both are accepted, and a server that refuses the new one is sent the old one. A process
    reads these two files again when a token is refused. If this is empty, the environment variable
    AREAL_SECURITY_DIR can name the folder.
    `redis-password` and `nats-token` are used if the URLs in endpoints.redis and endpoints.nats
    contain no secret. Instead of a file, you can set the environment variable AREAL_TOKEN,
    AREAL_TOKEN_PREVIOUS, AREAL_REDIS_PASSWORD or AREAL_NATS_TOKEN. If there is no token, `areal
    run`, `areal up` and `areal serve` create one at each start, and a service that you start
    yourself requires none."""
    tls_dir: str = ""
    """Folder of PEM files for mutual TLS on gRPC. `tls.crt` is the certificate, which must cover
    the host names in `endpoints`, and `tls.key` is its private key. `ca.crt` contains the
    authorities that signed the certificates of all peers."""
    allow_insecure_bind: bool = False
    """Allow a service without a token to listen on an address that other machines can reach."""

    @property
    def token_file(self) -> str:
        """The file with the token; "" if `dir` has none."""
        file = Path(self.dir) / "token"
        return str(file) if self.dir and file.is_file() else ""

    def files(self) -> list[Path]:
        """The files that hold secrets."""
        held = [Path(self.dir) / name for name in _FILES] if self.dir else []
        keys = [Path(self.tls_dir) / "tls.key"] if self.tls_dir else []
        return [file for file in [*held, *keys] if file.is_file()]


@dataclass(frozen=True)
class Tls:
    """PEM contents for mutual TLS."""

    certificate: bytes
    key: bytes = field(repr=False)
    authorities: bytes


@dataclass
class Security:
    """The secrets of one process; the default is none at all.

    Tokens from files are read again when one is refused: a process that runs for weeks need not be
    restarted to learn a new token.

    Example:
        >>> Security(token="0123456789abcdef").admits("Bearer 0123456789abcdef")
        True
    """

    token: str = field(default="", repr=False)
    previous_token: str = field(default="", repr=False)
    """Also accepted, and sent to a server that refuses `token`, while a token is rotated."""
    redis_password: str = field(default="", repr=False)
    nats_token: str = field(default="", repr=False)
    tls: Tls | None = None
    allow_insecure_bind: bool = False
    _folder: Path | None = field(default=None, repr=False, compare=False)
    _looked: float = field(default=-_LOOK_S, repr=False, compare=False)

    @classmethod
    def load(cls, config: SecurityConfig, environment: Mapping[str, str] = os.environ) -> Security:
        """Reads files and variables.

        Raises:
            ConfigError: A file cannot be read, or does not hold a valid token.
        """
        place = config.dir or environment.get(FOLDER_VARIABLE, "")
        folder = Path(place) if place else None
        if folder and not any((folder / name).is_file() for name in _FILES):
            key = "security.dir" if config.dir else FOLDER_VARIABLE
            raise ConfigError(
                f"{key} {place!r}: expected a folder with files of {', '.join(_FILES)}"
            )
        token, previous, redis, nats = (
            _secret(folder and folder / name, variable, environment)
            for name, variable in _FILES.items()
        )
        file = folder / "token" if folder else None
        known = file is not None and file.is_file()
        return cls(
            token=_checked(token, str(file) if known else TOKEN_VARIABLE),
            previous_token=_checked(previous, PREVIOUS_VARIABLE) if token else "",
            redis_password=redis,
            nats_token=nats,
            tls=_tls(config.tls_dir) if config.tls_dir else None,
            allow_insecure_bind=config.allow_insecure_bind,
            _folder=folder if known else None,
        )

    @classmethod
    def of_token_file(cls, file: str, *, allow_insecure_bind: bool = False) -> Security:
        """Reads the token from one file; "" means the variable.

        Raises:
            ConfigError: The file cannot be read, or does not hold a valid token.
        """
        token = _secret(Path(file) if file else None, TOKEN_VARIABLE, os.environ, needed=True)
        previous = _secret(None, PREVIOUS_VARIABLE, os.environ)
        return cls(
            token=_checked(token, file or TOKEN_VARIABLE),
            previous_token=_checked(previous, PREVIOUS_VARIABLE) if token else "",
            allow_insecure_bind=allow_insecure_bind,
        )

    def admits(self, authorization: str | bytes | None) -> bool:
        """Whether an Authorization header carries the token, or during a rotation the previous one.

        Without a token everything passes. Takes the same time wherever a wrong token differs.
        """
        if not self.token or self._known(authorization):
            return True
        return self._read_again() and self._known(authorization)

    def untried(self, refused: Collection[str]) -> str:
        """Returns the token to present to a server that refused these; "": there is none left.

        It is ours, then the previous one, then what the files contain by now.
        """
        known = self._unrefused(refused)
        if not known:
            self._read_again()
            known = self._unrefused(refused)
        return known

    def _unrefused(self, refused: Collection[str]) -> str:
        ours = (self.token, self.previous_token)
        return next((each for each in ours if each and each not in refused), "")

    def _read_again(self) -> bool:
        """Whether the files contain other tokens than before; at most once a second.

        A file that cannot be read, or holds no token, changes nothing: it may be half written.
        """
        now = time.monotonic()
        if self._folder is None or now - self._looked < _LOOK_S:
            return False
        self._looked, before = now, (self.token, self.previous_token)
        try:
            found = Security.load(SecurityConfig(dir=str(self._folder)), {})
        except ConfigError:
            return False
        if found.token:
            self.token, self.previous_token = found.token, found.previous_token
        return (self.token, self.previous_token) != before

    def _known(self, authorization: str | bytes | None) -> bool:
        given = authorization or b""
        given = given.encode(errors="replace") if isinstance(given, str) else given
        scheme, _, token = given.partition(b" ")
        ours = [each.encode() for each in (self.token, self.previous_token) if each]
        known = [hmac.compare_digest(token, each) for each in ours]
        return scheme.lower() == b"bearer" and any(known)

    def foreign(self, header: Callable[[str], str | None]) -> str:
        """Says why an HTTP request may come from a foreign web page; "" if it does not.

        Without a token only this machine can connect, but a browser on it may run foreign pages.
        Its headers say which page sends a request and which host name it used: a page can resolve
        its own name to our address. With a token this check is not needed, because a page does not
        know it.

        Args:
            header: The request's headers by lower-case name; None: absent.
        """
        if self.token or self.allow_insecure_bind:
            return ""
        host = header("host") or ""
        name = urlsplit(f"//{host}").hostname or ""
        if host and name != "localhost" and not _is_address(name):
            return f"Host {host[:80]!r}: without a token, only localhost or IPs are allowed"
        origin = header("origin")
        if origin is not None and urlsplit(origin).netloc != host:
            return f"Origin {origin[:80]!r}: without a token, only our pages are allowed"
        if (site := header("sec-fetch-site") or "none") not in ("none", "same-origin"):
            return f"Sec-Fetch-Site {site[:20]!r}: without a token, only our pages are allowed"
        return ""

    def headers(self) -> dict[str, str]:
        """Returns the headers that an HTTP client sends."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def previous_headers(self) -> dict[str, str]:
        """Returns what a client sends to a server that refuses `headers()`; {}: nothing else."""
        token = self.previous_token
        return {"Authorization": f"Bearer {token}"} if token else {}

    def check_bind(self, host: str, key: str) -> None:
        """Refuses an address that other machines reach if there is no token.

        Raises:
            ConfigError: Names `key` and the ways out.
        """
        if self.token or self.allow_insecure_bind or is_loopback(host):
            return
        raise ConfigError(
            f"{key} {host!r}: other machines can reach this address and there is no token; set "
            "security.dir or AREAL_TOKEN, use a loopback address, or set "
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
    """Returns an environment without secrets, for child processes."""
    return {k: v for k, v in environment.items() if k not in SECRET_VARIABLES}


def redact(text: str) -> str:
    """Hides passwords in URLs and bearer tokens: the last safeguard for log lines."""
    if "@" in text:
        text = _USERINFO.sub("***@", text)
    return _BEARER.sub(r"\1***", text)


def _secret(
    file: Path | None, variable: str, environment: Mapping[str, str], *, needed: bool = False
) -> str:
    if file is not None and (needed or file.is_file()):
        name, value = f"{str(file)!r}", _read(file).decode(errors="replace").strip()
    else:
        name, value = variable, environment.get(variable, "")
        if not value:
            return ""
    if not _PRINTABLE.fullmatch(value):
        raise ConfigError(f"{name}: expected one line of printable characters without spaces")
    return value


def _checked(token: str, source: str) -> str:
    if token and (len(token) < MIN_TOKEN_LENGTH or not _TOKEN.fullmatch(token)):
        raise ConfigError(
            f"{source}: a token of {len(token)} characters, expected {MIN_TOKEN_LENGTH} or more "
            "of letters, digits and ._~+/=-"
        )
    return token


def _tls(folder: str) -> Tls:
    contents = []
    for name in ("tls.crt", "tls.key", "ca.crt"):
        contents.append(_read(Path(folder) / name))
        if b"-----BEGIN " not in contents[-1]:
            raise ConfigError(f"security.tls_dir {folder!r}: {name} is not a PEM file")
    certificate, key, authorities = contents
    return Tls(certificate, key, authorities)


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{str(file)!r}: {error.strerror or error}") from None

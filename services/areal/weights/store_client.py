"""Blocking HTTP client of the weight store, for the trainer and for servers that pull.

Bodies go from the caller's memory to the socket and from the socket into the caller's memory; no
call holds one whole.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

import xxhash

from areal.errors import InvalidInput
from areal.weights.manifest import (
    MANIFEST,
    PolicyVersion,
    WeightFile,
    from_json,
    parse_version_dir,
)
from areal.weights.publisher import TransportError, patience_s

DIGEST_HEADER = "Areal-Digest"
CHUNK_BYTES = 32 << 20
MAX_CHUNK_BYTES = 256 << 20
TIMEOUT_S = 60.0
"""Deadline of each wait on the store's socket, in seconds."""
MAX_MANIFEST_BYTES = 64 << 20
_MAX_ERROR_BYTES = 4096
_BLOCK_BYTES = 1 << 20
_PREFIX = "/versions/"


class StoreConnection:
    """One connection to a weight store; not for several threads at once.

    Example:
        >>> with StoreConnection("http://10.0.0.7:8500", headers, timeout=30.0) as store:
        ...     store.manifest("v00000012-inc3")
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        timeout: float,
        *,
        untried: Callable[[Collection[str]], str] | None = None,
    ) -> None:
        """Connects on first use.

        Args:
            url: http://host:port.
            headers: The bearer token.
            timeout: Seconds for each wait on the socket.
            untried: `Security.untried`, where another token may be known when one is refused.
        """
        try:
            parts = urlsplit(url)
            if parts.scheme != "http" or not parts.hostname:
                raise ValueError
            self._http = http.client.HTTPConnection(
                parts.hostname, parts.port or 80, timeout=timeout, blocksize=_BLOCK_BYTES
            )
        except (ValueError, http.client.InvalidURL):
            raise InvalidInput(f"weight store {url[:200]!r}: expected http://host:port") from None
        self.url = f"http://{parts.netloc}"
        self._headers = dict(headers)
        self._untried = untried or (lambda _: "")
        self._timeout = timeout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection; the next call opens another."""
        self._http.close()

    def manifest(self, name: str) -> PolicyVersion:
        """Returns the manifest of a version."""
        response = self._send("GET", f"/versions/{name}/{MANIFEST}")
        return from_json(self._body(response, MAX_MANIFEST_BYTES))

    def companions(self, name: str) -> list[WeightFile]:
        """Returns tokenizer and configuration files next to a version's weights."""
        response = self._send("GET", f"/versions/{name}")
        try:
            entries = json.loads(self._body(response, MAX_MANIFEST_BYTES))["files"]
            return [
                WeightFile(str(e["name"]), int(e["size_bytes"]), str(e["digest"])) for e in entries
            ]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"weight store {self.url}: {name}: {error!r}") from None

    def begin(self, name: str, manifest: str) -> None:
        """Announces an upload to the store."""
        self._body(self._send("POST", f"/versions/{name}", manifest.encode()), _MAX_ERROR_BYTES)

    def put(
        self, name: str, file: str, chunk: Sequence[memoryview], offset: int, total: int
    ) -> None:
        """Stores one chunk of a file; its parts may be apart in memory."""
        digest, size = xxhash.xxh3_128(), sum(part.nbytes for part in chunk)
        for part in chunk:
            digest.update(part)
        headers = {
            "Content-Length": str(size),
            "Content-Range": f"bytes {offset}-{offset + size - 1}/{total}",
            DIGEST_HEADER: digest.hexdigest(),
        }
        response = self._send("PUT", f"/versions/{name}/{file}", chunk, headers)
        self._body(response, _MAX_ERROR_BYTES)

    def commit(self, name: str, size_bytes: int = 0) -> str:
        """Ends an upload and states its size; the store then hashes it.

        Returns:
            The folder's path at the store.
        """
        response = self._send("POST", f"/versions/{name}/commit", b"", wait=patience_s(size_bytes))
        answer: dict[str, Any] = json.loads(self._body(response, _MAX_ERROR_BYTES))
        return str(answer["path"])

    def read_into(self, name: str, file: str, offset: int, target: memoryview) -> None:
        """Fills `target` with the bytes of a file from `offset` on, a chunk per request.

        Raises:
            TransportError: The store does not answer, refuses, or sends other bytes than requested.
        """
        for start in range(0, target.nbytes, CHUNK_BYTES):
            with target[start : start + CHUNK_BYTES] as part:
                self._read_range(name, file, offset + start, part)

    def _read_range(self, name: str, file: str, offset: int, target: memoryview) -> None:
        asked = f"bytes={offset}-{offset + target.nbytes - 1}"
        response = self._send("GET", f"/versions/{name}/{file}", None, {"Range": asked})
        given = response.getheader("Content-Range", "")
        if response.status != 206 or not given.startswith(asked.replace("=", " ") + "/"):
            self._http.close()
            raise TransportError(
                f"{self.url}: {name}/{file}: asked for {asked}, got "
                f"HTTP {response.status} {given!r:.80}"
            )
        filled = 0
        since = time.monotonic()
        try:
            while filled < target.nbytes:
                count = response.readinto(target[filled:])
                if not count:
                    raise http.client.IncompleteRead(b"", target.nbytes - filled)
                filled += count
        except (OSError, http.client.HTTPException) as error:
            self._http.close()
            raise TransportError(
                f"{self.url}: {name}/{file}: {filled} of {target.nbytes} bytes after "
                f"{time.monotonic() - since:.1f} s: {error or type(error).__name__}"
            ) from None

    def _send(
        self,
        method: str,
        path: str,
        body: bytes | Sequence[memoryview] | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        wait: float = 0.0,
    ) -> http.client.HTTPResponse:
        response = self._send_once(method, path, body, headers or {}, wait)
        refused: list[str] = []
        while response.status == 401:
            refused.append(self._headers.get("Authorization", "").removeprefix("Bearer "))
            if not (token := self._untried(refused)):
                break
            self._http.close()
            self._headers["Authorization"] = f"Bearer {token}"
            response = self._send_once(method, path, body, headers or {}, wait)
        if response.status >= 300:
            text = response.read(_MAX_ERROR_BYTES).decode(errors="replace")
            self._http.close()
            with contextlib.suppress(ValueError, KeyError, TypeError):
                text = json.loads(text)["error"]
            raise TransportError(f"weight store {self.url}: HTTP {response.status}: {text}")
        return response

    def _send_once(
        self,
        method: str,
        path: str,
        body: bytes | Sequence[memoryview] | None,
        headers: Mapping[str, str],
        wait: float,
    ) -> http.client.HTTPResponse:
        try:
            self._http.request(method, path, body, {**self._headers, **headers})
            self._http.sock.settimeout(max(wait, self._timeout))
            response = self._http.getresponse()
            if self._http.sock is not None:  # else it ends with this answer
                self._http.sock.settimeout(self._timeout)
        except (OSError, UnicodeError, http.client.HTTPException) as error:  # a host may be no name
            self._http.close()
            raise TransportError(
                f"weight store {self.url}: {error or type(error).__name__}"
            ) from None
        return response

    def _body(self, response: http.client.HTTPResponse, limit: int) -> bytes:
        try:
            body = response.read(limit + 1)
        except (OSError, http.client.HTTPException) as error:
            self._http.close()
            raise TransportError(f"weight store {self.url}: {error}") from None
        if len(body) > limit:
            self._http.close()
            raise TransportError(f"weight store {self.url}: an answer of more than {limit} bytes")
        return body


def split_location(location: str) -> tuple[str, str]:
    """Returns (store's url, version) of http://host:port/versions/NAME; raises InvalidInput."""
    url, _, name = location.partition(_PREFIX)
    if parse_version_dir(name) is None:
        raise InvalidInput(f"{location[:200]!r}: expected http://host:port/versions/NAME")
    return url, name

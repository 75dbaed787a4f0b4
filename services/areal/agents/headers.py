"""What the headers of an agent's request say: its API key, and whether it repeats another one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

KEYS = ("authorization", "x-api-key", "api-key")
"""Headers that carry the API key, as OpenAI's, Anthropic's and Azure's clients send it."""
RETRIES = "x-stainless-retry-count"
REQUEST_IDS = ("idempotency-key", "x-client-request-id")
"""Headers by which a client identifies a request; a repeated request has the same value."""
READ = (*KEYS, RETRIES, *REQUEST_IDS)
"""All headers that are read."""


def api_key(headers: Mapping[str, str]) -> str:
    """Returns the API key, or ""; names of headers in lower case."""
    scheme, _, key = headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or headers.get("api-key") or scheme


@dataclass(frozen=True)
class Repeats:
    """How a request that a client sends again can be recognized."""

    retry: bool = False
    """The client's SDK says that it repeats an earlier request."""
    key: str = ""
    """Digest of the client's name for the request; may be empty."""

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> Self:
        """Reads a request's headers, whose names are in lower case."""
        given = next((headers[name] for name in REQUEST_IDS if headers.get(name)), "")
        encoded = given.encode(errors="surrogatepass")
        key = hashlib.blake2b(encoded, digest_size=8).hexdigest() if given else ""
        return cls(headers.get(RETRIES, "0").strip() not in ("", "0"), key)

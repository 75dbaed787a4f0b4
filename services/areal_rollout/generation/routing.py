"""Chooses a server for a request: the one with the fewest outstanding tokens.

Outstanding tokens are those that this process has sent to a server and not received back. A server
that is ten times slower keeps them ten times longer, so it gets a tenth of the requests. Requests
that share a prefix (the samples of a group, the turns of a conversation) stay on one server, whose
radix cache has the prefix, as long as that server is not much more loaded than another.

This module has no clock and no sockets: the server table calls it and passes the time.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from yarl import URL

# With more servers than this, the least loaded of this many random ones: nearly as even as
# scanning all (Mitzenmacher, "The power of two choices", 2001), at a cost that does not grow.
_DRAWN = 4
_AFFINITIES = 50_000
# A group stays on a server with up to this many requests more than twice another's load.
_PATIENCE = 16


@dataclass(eq=False, slots=True)
class Server:
    """One server as this process sees it."""

    url: str
    generate_url: URL
    abort_url: URL
    version: int = -1
    """Confirmed policy version."""
    adapter: str = ""
    """Name of the adapter that is this version; empty: its weights are."""
    serving: bool = False
    note: str = ""
    """State and cause, for error messages."""
    outstanding: int = 0
    """Tokens of this process's requests that run there: prompts, and tokens still to generate."""
    running: set[asyncio.Timeout] = field(default_factory=set)
    """One timeout per running request; setting it to the current time abandons the request."""
    failures: int = 0
    """Failures in a row."""
    blocked_until: float = 0.0
    """Event-loop time until which the server gets no request."""


class Router:
    """Chooses servers with constant work per request, however many there are.

    Example:
        >>> router.choose(servers, now=12.5, min_version=3, key="e0-17", cost=600)
    """

    def __init__(self, seed: int | None = None) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a load balancer's, not a secret
        self._held: OrderedDict[str, Server] = OrderedDict()

    def choose(
        self,
        servers: Sequence[Server],
        *,
        now: float,
        min_version: int,
        key: str,
        cost: int,
        avoid: Collection[str] = (),
    ) -> Server | None:
        """Returns one of the servers; None while all are blocked.

        Args:
            servers: The admissible ones.
            now: Compared with `blocked_until`.
            min_version: Theirs; one held from before may have fallen behind it.
            key: The prefix's key; "" for none.
            cost: Tokens of the request: prompt and still to come.
            avoid: Urls taken only if there is no other.
        """
        drawn = servers
        if len(servers) > _DRAWN:
            drawn = self._random.sample(servers, _DRAWN)
        best = _least(drawn, now, avoid)
        if best is None and drawn is not servers:  # bad luck, or most of them are blocked
            best = _least(servers, now, avoid)
        if best is None:
            best = _least(servers, now, ())
        if best is None or not key:
            return best
        held = self._held.get(key)
        if (
            held is not None
            and held.serving
            and held.version >= min_version
            and held.blocked_until <= now
            and held.url not in avoid
            and held.outstanding <= 2 * best.outstanding + _PATIENCE * cost
        ):
            return held
        self._held[key] = best
        if len(self._held) > _AFFINITIES:
            self._held.popitem(last=False)
        return best


def _least(servers: Sequence[Server], now: float, avoid: Collection[str]) -> Server | None:
    usable = [s for s in servers if s.blocked_until <= now and s.url not in avoid]
    return min(usable, key=lambda server: server.outstanding, default=None)

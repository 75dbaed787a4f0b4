"""The configured transport, and the others behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from areal.observability.logging import get_logger
from areal.transports.base import NewVersion, Publisher, TransportError
from areal.weights import PolicyVersion


class FallbackPublisher:
    """Tries each in order; the one that worked is tried first the next time."""

    name = "fallback"

    def __init__(self, publishers: Sequence[Publisher]) -> None:
        """Takes at least one."""
        self._publishers = list(publishers)
        self._log = get_logger("areal.transports")

    def publish(self, new: NewVersion, announce: Callable[[PolicyVersion], None]) -> PolicyVersion:
        """See `base.Publisher`; the error names every way that was tried."""
        causes: list[str] = []
        for publisher in list(self._publishers):
            try:
                published = publisher.publish(new, announce)
            except TransportError as error:
                causes.append(f"{publisher.name}: {error}")
                continue
            if causes:
                self._log.warning(
                    "transport_fell_back",
                    version=new.version,
                    to=publisher.name,
                    cause="; ".join(causes)[:500],
                )
                self._publishers.remove(publisher)
                self._publishers.insert(0, publisher)
            return published
        raise TransportError(f"version {new.version} cannot be published: {'; '.join(causes)}")

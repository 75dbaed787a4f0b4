"""Chooses the routes by which a version reaches a server, and their order."""

from __future__ import annotations

import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from areal.weights.manifest import PolicyVersion
from areal_weight_sync.engine.base import EngineError, Fault


@dataclass(frozen=True)
class Routes:
    """The configured transport, then the others.

    Example:
        >>> Routes(("stream", "disk"), "http://weight-sync:8500", 8501)
    """

    order: tuple[str, ...] = ("disk",)
    store: str = ""
    """http://host:port of the weight store, as servers reach it."""
    sidecar_port: int = 0
    """Port on which the sidecar listens on each server's host."""

    def starting_with(self, first: str) -> tuple[str, ...]:
        """Returns all routes, first the one that worked last."""
        return (first, *(name for name in self.order if name != first))

    def location(self, version: PolicyVersion) -> str:
        """Returns where servers pull a version from."""
        if not self.store:
            raise EngineError(
                Fault.UPDATE_REFUSED, "endpoints.weight_store '': there is no weight store"
            )
        return f"{self.store}/versions/{version.folder_name}"

    def sidecar(self, server: str) -> str:
        """Returns the sidecar of a server's host."""
        host = urlsplit(server).hostname or ""
        return f"http://{f'[{host}]' if ':' in host else host}:{self.sidecar_port}"


class Tried:
    """Transports that failed a version on its way to one server, and why."""

    def __init__(self, version: PolicyVersion, timeout: float) -> None:
        """Starts the one time limit that all of them share."""
        self.version = version
        self.causes: list[str] = []
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout

    def left(self) -> float:
        """Returns the seconds that a request may take; raises EngineError if there are none."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise EngineError(Fault.TIMEOUT, "no time left")
        return left

    def failed(self, transport: str, error: EngineError) -> None:
        """Notes a refusal; what another transport could not help either is raised."""
        if error.fault is Fault.TIMEOUT and self.causes:
            refused = "; ".join(self.causes)
            raise EngineError(
                Fault.TIMEOUT,
                f"{transport}: {error}; {self._timeout:.1f} s in all, after {refused}",
            ) from None
        if error.fault is not Fault.UPDATE_REFUSED:
            raise error
        self.causes.append(f"{transport}: {error}")

    def error(self) -> EngineError:
        """Returns one error that names each failed transport."""
        return EngineError(Fault.UPDATE_REFUSED, "; ".join(self.causes))

"""Inference servers as weight-sync knows them, and the state of the current version."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from areal.weights.manifest import PolicyVersion


class ServerState(StrEnum):
    """The state of an inference server."""

    JOINING = "joining"
    """The server is known, but not yet at a confirmed version."""
    SYNCING = "syncing"
    """Weights are being updated and requests should go elsewhere."""
    SERVING = "serving"
    """Takes traffic at `version` (or is within moments of a newer one)."""
    DRAINING = "draining"
    """Takes no new traffic; leaves when empty or past its deadline."""
    QUARANTINED = "quarantined"
    """Failed a probe or an update; retried with backoff, takes no traffic."""


@dataclass(frozen=True)
class InferenceServer:
    """One inference server and its state.

    Example:
        >>> InferenceServer("127.0.0.1:30000", "http://127.0.0.1:30000", ServerState.SERVING, 12)
    """

    server_id: str
    """host:port of the url."""
    url: str
    state: ServerState = ServerState.JOINING
    version: int = -1
    """Confirmed policy version; -1 before the first."""
    cause: str = ""
    """Why it is quarantined, or the last error."""
    since: float = 0.0
    """Unix seconds when it entered the state."""
    aborted_requests: int = 0
    """Requests that updates aborted (paused ones do not count)."""
    adapter: str = ""
    """Name of the adapter that is `version`: requests have to name it, or the server computes them
    with version 0. Empty: `version` is whole weights."""


@dataclass(frozen=True)
class ServerChanges:
    """An answer to "which servers have changed since?"."""

    servers: tuple[InferenceServer, ...]
    """Servers that have changed; all of them if `whole` is true."""
    gone: tuple[str, ...] = ()
    """Ids of servers that are no longer known."""
    whole: bool = True
    """Whether servers that are not in `servers` are no longer known."""
    as_of: str = ""
    """The value to pass with the next request."""


@dataclass(frozen=True)
class SyncStatus:
    """The state of the current version on all servers."""

    current: PolicyVersion | None
    """The current version; None until version 0 is published. From a watch it has neither files nor
    tensors: those are in `manifest.json` of its path."""
    confirmed_servers: int = 0
    """Number of servers that are SERVING at the current version."""
    servers: int = 0
    """All servers that are not draining."""
    confirmed_version: int = -1
    """Highest version that at least one server has confirmed in this trial."""
    updates: int = 0
    """Versions published by the trainer, over the trial."""
    update_seconds_mean: float = 0.0
    """Mean time from pause to continue, per update of a server that was serving, in seconds."""
    aborted_requests: int = 0
    """Requests that updates aborted, over the trial."""
    draining: int = 0
    """Servers that take no new traffic and leave when they are empty."""
    unstored: bool = False
    """Whether the current version is still only in servers' memory."""

    @property
    def current_version(self) -> int:
        """The current policy version; -1 before version 0."""
        return -1 if self.current is None else self.current.version

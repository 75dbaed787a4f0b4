"""The state of one inference server; the only module that changes it.

                          reached, weights loading
              ┌─────────┐ ───────────────────────> ┌─────────┐
    known ──> │ JOINING │                          │ SYNCING │ <──┐ update longer than the grace,
              └─────────┘ ──┐ already at the       └─────────┘    │ or engine without checksums
                 ^   ^      │ target: confirmed       │ confirmed │
    backoff over │   │      │                         v           │
                 │   │      └──────────────────> ┌─────────┐ ─────┘
                 │   └────────────────────────── │ SERVING │ <──┐ update within the grace,
        ┌─────────────┐    boot id or version    └─────────┘ ───┘ confirmed before "continue"
        │ QUARANTINED │ <── changed: restarted        │
        └─────────────┘     any failure, from anywhere
                                                      │ drain, from anywhere
                                                 ┌──────────┐ empty or past its deadline
                                                 │ DRAINING │ ──> forgotten
                                                 └──────────┘

| state       | consumes           | waits for                     | unblocked by                  |
|-------------|--------------------|-------------------------------|-------------------------------|
| JOINING     | first answers      | the server, a version         | it answers; version 0         |
| SYNCING     | the target's files | load and confirmation         | done, or update_timeout_s     |
| SERVING     | probes, new targets| a change                      | publish, report, probe, drain |
| QUARANTINED | nothing            | backoff                       | its end, a report, register   |
| DRAINING    | nothing            | running requests to end       | empty, or the drain deadline  |

A server that was SERVING stays listed SERVING at its confirmed version during an update that ends
within the grace: a request sent meanwhile waits in the paused server for some milliseconds and
then runs at the new version, which is confirmed before the pause ends. So a rollout worker always
finds a server although all are updated at once, and none serves what was not confirmed.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field

from areal.errors import InvalidInput
from areal.weights.manifest import PolicyVersion
from areal.weights.servers import InferenceServer, ServerState

JOINING, SYNCING, SERVING = ServerState.JOINING, ServerState.SYNCING, ServerState.SERVING
DRAINING, QUARANTINED = ServerState.DRAINING, ServerState.QUARANTINED

TRANSITIONS: dict[ServerState, frozenset[ServerState]] = {
    JOINING: frozenset({SYNCING, SERVING, QUARANTINED, DRAINING}),
    SYNCING: frozenset({SERVING, JOINING, QUARANTINED, DRAINING}),
    SERVING: frozenset({SYNCING, JOINING, QUARANTINED, DRAINING}),
    QUARANTINED: frozenset({JOINING, DRAINING}),
    DRAINING: frozenset({JOINING}),  # registered again before it was gone
}


@dataclass
class ServerRecord:
    """One server's state; changed by `move` and by its own member only.

    Example:
        >>> record = ServerRecord("10.0.0.7:30000", "http://10.0.0.7:30000")
        >>> record.move(ServerState.SYNCING)
    """

    server_id: str
    url: str
    origin: str = ""
    """The entry of `endpoints.inference` that found it; empty: registered by RPC."""
    state: ServerState = JOINING
    version: int = -1
    """Version confirmed since the server's last boot; -1: none."""
    digest: str = ""
    """`PolicyVersion.digest` of it: a trainer that resumes may produce a version again, so the
    number alone does not identify what this server has. Empty: an earlier release did not note
    it."""
    adapter: str = ""
    """Name of the adapter that is `version`; empty: it is whole weights."""
    cause: str = ""
    since: float = field(default_factory=time.time)
    aborted_requests: int = 0
    boot_id: str = ""
    """Id of the boot that confirmed `version`; empty: never reached."""

    def move(self, state: ServerState, cause: str = "") -> bool:
        """Enters a state (or notes a new cause in the same one); says whether anything changed.

        Raises:
            ValueError: The table does not allow it: a mistake in this program.
        """
        if state is self.state:
            changed = cause != self.cause
            self.cause = cause
            return changed
        if state not in TRANSITIONS[self.state]:
            raise ValueError(f"server {self.server_id}: {self.state} -> {state} is not allowed")
        self.state, self.cause, self.since = state, cause, time.time()
        return True

    def hold(self, version: PolicyVersion) -> None:
        """Records that its weights are confirmed to be that version's."""
        self.version, self.digest = version.version, version.digest
        self.adapter = version.adapter_name

    def holds(self, version: PolicyVersion) -> bool:
        """Whether that version's weights are what was confirmed."""
        return self.version == version.version and self.digest in ("", version.digest)

    def holds_other(self, version: PolicyVersion) -> bool:
        """Whether other weights with the same number were confirmed."""
        return self.version == version.version and not self.holds(version)

    def public(self) -> InferenceServer:
        """Returns what others see."""
        return InferenceServer(
            server_id=self.server_id,
            url=self.url,
            state=self.state,
            version=self.version,
            cause=self.cause,
            since=self.since,
            aborted_requests=self.aborted_requests,
            adapter=self.adapter,
        )

    def to_json(self) -> str:
        """Returns one line of JSON; `from_json` reads it."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> ServerRecord:
        """Reads the record of this service's previous incarnation; the server joins again with it.

        Raises:
            InvalidInput: Not a record.
        """
        try:
            raw = json.loads(text)
            return cls(
                server_id=str(raw["server_id"]),
                url=str(raw["url"]),
                origin=str(raw.get("origin", "")),
                version=int(raw["version"]),
                digest=str(raw.get("digest", "")),
                adapter=str(raw.get("adapter", "")),
                aborted_requests=int(raw["aborted_requests"]),
                boot_id=str(raw["boot_id"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidInput(f"server record: {error!r}") from None

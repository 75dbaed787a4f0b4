"""The states of a task and every transition there is. The Lua prelude's table is made from this.

+-- returned, lease expired, too stale --+
v                                        |
submitted -> queued -> running -> completed -> batched -> trained
|  ^       |           |
|  |       +-----------+-> delivered (serve), rejected, cancelled,
|  |                       expired, dead_lettered
|  +-- retried by a person --- dead_lettered
|  +-- submitted again, its result read and released --- delivered
+-> completed / delivered / rejected: the lease had expired, the work came late

A session, which outside agents run, begins as running. When they fall silent, it is queued for a
worker if any attempt has ended. Everywhere else it expires where another task would be queued.
"""

from __future__ import annotations

from areal.types import TaskState as S

TRANSITIONS: dict[S, frozenset[S]] = {
    S.QUEUED: frozenset(
        {
            S.RUNNING,  # leased
            S.COMPLETED,  # late completion by the last, expired lease
            S.DELIVERED,  # the same, purpose serve
            S.REJECTED,  # the same, rejection
            S.CANCELLED,
            S.EXPIRED,
        }
    ),
    S.RUNNING: frozenset(
        {
            S.QUEUED,  # returned, lease expired, revoked as a straggler
            S.COMPLETED,
            S.DELIVERED,
            S.REJECTED,
            S.CANCELLED,
            S.EXPIRED,
            S.DEAD_LETTERED,
        }
    ),
    S.COMPLETED: frozenset(
        {
            S.BATCHED,
            S.QUEUED,  # too stale: generated again
            S.EXPIRED,  # the same, of a session: no one can run it again
            S.CANCELLED,
            S.DEAD_LETTERED,  # too stale too often
        }
    ),
    S.BATCHED: frozenset({S.TRAINED}),
    S.TRAINED: frozenset(),
    S.DELIVERED: frozenset({S.QUEUED}),  # submitted again after its result was released
    S.REJECTED: frozenset(),
    S.CANCELLED: frozenset(),
    S.EXPIRED: frozenset(),
    S.DEAD_LETTERED: frozenset({S.QUEUED}),  # retried by a person
}


def transitions_as_lua() -> str:
    """Returns the table as a Lua constructor: {["queued>running"]=true, …}."""
    pairs = sorted(f"{source}>{to}" for source, targets in TRANSITIONS.items() for to in targets)
    return "{" + ",".join(f'["{pair}"]=true' for pair in pairs) + "}"

"""Calls BufferService about the sessions of outside agents."""

from __future__ import annotations

import re
from collections.abc import Sequence

from areal.clients.base import to_duration
from areal.clients.buffer.connection import Role
from areal.errors import NotFound
from areal.protocol.trajectories import task_to_pb
from areal.types import Task
from areal.v1 import buffer_service_pb2 as pb

# Only our spelling: another one of the number would be another name of the session.
_ATTEMPT = re.compile(r"0|[1-9][0-9]{0,3}")


def place_of(session_id: str) -> tuple[str, int]:
    """Returns the task and the attempt that a session's id names; raises NotFound."""
    task_id, _, attempt = session_id.rpartition("-")
    if not task_id or not _ATTEMPT.fullmatch(attempt):
        raise NotFound(f"session {session_id[:80]!r}: unknown")
    return task_id, int(attempt)


class BufferSessions(Role):
    """Opens and records sessions. Their state is in the ledger: any process may serve any."""

    async def open(
        self, task: Task, key_digests: Sequence[str], idle_s: float, salt: bytes
    ) -> pb.OpenSessionResponse:
        """Opens a session as a task with one attempt for each key.

        Args:
            task: Its id is the idempotency key.
            key_digests: sha256 in hex of the API key of each attempt.
            idle_s: The session expires when its agents are silent this long.
            salt: What the caller derived the keys from, at most 64 random bytes. If the session is
                already open, the response has the salt of its keys, and these keys are not used.

        Raises:
            InvalidInput: The session was opened by another request.
            CapacityExceeded: Admission lets no episode start now; the error says when to try again.
        """
        request = pb.OpenSessionRequest(
            task=task_to_pb(task), key_digests=key_digests, idle=to_duration(idle_s), salt=salt
        )
        return await self._call(self._stub.OpenSession, request)

    async def get(
        self, task_id: str, attempt: int, known: pb.SessionKnown | None = None
    ) -> pb.GetSessionResponse:
        """Returns an attempt with its calls; raises NotFound.

        Args:
            task_id: The session's task.
            attempt: From 0.
            known: The calls that need not be sent. Whether they were left out is in the answer's
                `continued`.
        """
        request = pb.GetSessionRequest(task_id=task_id, attempt=attempt, known=known)
        return await self._call(self._stub.GetSession, request)

    async def update(self, request: pb.UpdateSessionRequest) -> pb.UpdateSessionResponse:
        """Records what an agent did; idempotent.

        Raises:
            LeaseLost: The session or this attempt has ended.
            NotFound: There is no such session, attempt or answer.
            CapacityExceeded: Memory is near its limit: try again later.
        """
        return await self._call(self._stub.UpdateSession, request)

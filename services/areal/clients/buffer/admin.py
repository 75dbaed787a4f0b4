"""Manages dead letters: tasks that failed permanently."""

from __future__ import annotations

from collections.abc import Sequence

from areal.clients.buffer.connection import Role
from areal.protocol.leases import DeadLetter, record_from_pb
from areal.v1 import buffer_service_pb2 as pb


class BufferAdmin(Role):
    """Lists dead letters, tries them again, drops them."""

    async def list_dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        """Returns dead letters, the newest first."""
        response = await self._call(
            self._stub.ListDeadLetters, pb.ListDeadLettersRequest(limit=limit)
        )
        return [
            DeadLetter(record_from_pb(letter.record), letter.cause, letter.traceback)
            for letter in response.dead_letters
        ]

    async def retry_dead_letters(self, task_ids: Sequence[str] = ()) -> int:
        """Queues dead letters (empty: all) again with fresh attempts; returns how many."""
        request = pb.RetryDeadLettersRequest(task_ids=task_ids)
        return (await self._call(self._stub.RetryDeadLetters, request)).retried

    async def drop_dead_letters(self, task_ids: Sequence[str] = ()) -> int:
        """Removes dead letters (empty: all) from the list permanently; returns how many."""
        request = pb.DropDeadLettersRequest(task_ids=task_ids)
        return (await self._call(self._stub.DropDeadLetters, request)).dropped

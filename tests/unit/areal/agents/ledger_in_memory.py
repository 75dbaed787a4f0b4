"""A session of the ledger in memory, behind two workers that take turns."""

from __future__ import annotations

from typing import Any

from areal.agents.tree import Call
from areal.protocol.trajectories import STATE_TO_PB
from areal.types import TaskState
from areal.v1 import buffer_service_pb2 as pb
from areal_rollout.ledger_calls import LedgerCalls
from areal_rollout.session_cache import CachedCalls


class LedgerInMemory:
    """What `BufferSessions` does for one attempt."""

    def __init__(self) -> None:
        self._calls: list[pb.SessionCall] = []
        self._workers = [CachedCalls(), CachedCalls()]

    async def update(self, request: pb.UpdateSessionRequest) -> pb.UpdateSessionResponse:
        number = len(self._calls)
        if request.HasField("begin"):
            self._calls.append(pb.SessionCall(number=number, prompt=request.begin.prompt))
            for more in range(1, request.begin.answers):
                self._calls.append(pb.SessionCall(number=number + more))
        else:
            record = request.record
            self._calls[record.number].answer.CopyFrom(record.answer)
        return pb.UpdateSessionResponse(number=number)

    def _store(self, cached: CachedCalls) -> LedgerCalls:
        found = pb.GetSessionResponse()
        found.record.state = STATE_TO_PB[TaskState.RUNNING]
        buffer: Any = self
        return LedgerCalls(buffer, found, 0, cached)

    def worker(self) -> LedgerCalls:
        """The session as the worker that is next reads it."""
        self._workers.reverse()
        cached = self._workers[0]
        known = cached.known or pb.SessionKnown()
        new = self._calls[known.calls :] + [self._calls[i] for i in known.unanswered]
        copies = []
        for call in new:
            copies.append(pb.SessionCall())
            copies[-1].CopyFrom(call)
        cached.add(copies)
        return self._store(cached)

    def calls(self) -> list[Call]:
        """All of them, read once more."""
        cached = CachedCalls()
        cached.add(self._calls)
        return self._store(cached).calls()

"""Serves outside agents: their requests come through a gateway, their state is the ledger's.

    agent ── HTTP ──> gateway ── CallSession ──> this worker ──> the model
                                                     │  GetSession, UpdateSession
                                                     v
                                                   ledger

| request           | reads                  | writes                                     |
|-------------------|------------------------|--------------------------------------------|
| a model call      | calls it does not have | prompt before, answer after generation     |
| POST /reward      | calls it does not have | a reward                                   |
| POST /end         | all attempts, the last | the mark; the group, once all have ended   |
| GET               | calls it does not have | nothing                                    |
| a lease           | all attempts           | the group of those that had ended when the |
|                   |                        | agents of the others fell silent           |

Any worker serves any request: what it keeps between them (`session_cache.py`) only saves reading.
One that dies in a call leaves a prompt without an answer, which is no part of any trajectory; the
agent's SDK asks again.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from areal.agents.fields import score
from areal.agents.replies import Reply
from areal.agents.routes import handle
from areal.agents.session import Model, Session, report_bug
from areal.agents.splits import mark
from areal.agents.tree import Merged, merge
from areal.clients.buffer.sessions import BufferSessions, place_of
from areal.errors import (
    ArealError,
    InvalidInput,
    LeaseLost,
    Unauthenticated,
    Unavailable,
    WorkflowError,
)
from areal.protocol.leases import Lease, Return, ReturnCause
from areal.protocol.trajectories import STATE_FROM_PB, task_from_pb
from areal.tokenizer import Tokenizer
from areal.types import (
    LLMRequest,
    LLMResponse,
    Score,
    StopReason,
    TaskState,
    Trajectory,
    TrajectoryGroup,
)
from areal.v1 import buffer_service_pb2 as pb
from areal.workflows.rendering import TemplateRenderer
from areal_rollout.config import RolloutConfig
from areal_rollout.interfaces import Buffer, Generation, Observer
from areal_rollout.ledger_calls import LedgerCalls
from areal_rollout.results import Rejection, judge
from areal_rollout.session_cache import CachedCalls, SessionCache
from areal_rollout.session_turns import SessionTurns

# An attempt that ended before its task is in one of these is in the group, or will be.
_MERGED = (
    TaskState.QUEUED,
    TaskState.COMPLETED,
    TaskState.BATCHED,
    TaskState.TRAINED,
    TaskState.DELIVERED,
    TaskState.REJECTED,
)
_WORKER = "session"


class Sessions:
    """Answers the requests of all sessions; `start` it once there is a model."""

    def __init__(
        self,
        sessions: BufferSessions,
        buffer: Buffer,
        config: RolloutConfig,
        observer: Observer,
    ) -> None:
        """Takes what it calls.

        Args:
            sessions: Where their calls are.
            buffer: Takes finished groups.
            config: Its `gconfig` is how to sample, whatever agents ask for: training assumes it.
            observer: Receives how many answers are left out, since their requests were repeated,
                and calls that failed with an unexpected exception.
        """
        self._observer = observer
        self._sessions, self._buffer, self._config = sessions, buffer, config
        self._model: tuple[Generation, Tokenizer, TemplateRenderer] | None = None
        self._cache = SessionCache()
        self._turns = SessionTurns()

    def start(self, generation: Generation, tokenizer: Tokenizer) -> None:
        """Sets the model, with which sessions can be served from now on."""
        self._model = generation, tokenizer, TemplateRenderer(tokenizer)

    async def serve(
        self, session_id: str, method: str, path: str, headers: Mapping[str, str], content: bytes
    ) -> Reply:
        """Answers one request; errors become the answer's status."""
        calls: LedgerCalls

        async def find(key: str) -> Session:
            nonlocal calls
            calls = await self._find(session_id, key)
            return Session(session_id, self._of(calls.found), calls)

        async def state(_: dict[str, Any]) -> dict[str, Any]:
            return _state(session_id, calls)

        async def end(body: dict[str, Any]) -> dict[str, Any]:
            return {"id": session_id, "state": await self._end(calls, score(body))}

        more = {("GET", ""): state, ("POST", "/end"): end}
        reply = await handle(find, method, path.rstrip("/"), headers, content, more, self._bug)
        return replace(reply, receipt=calls.receipt) if reply.status == 200 else reply

    def _bug(self, error: Exception) -> None:
        self._observer.agent_call_bug()
        report_bug(error)

    async def _find(self, session_id: str, key: str) -> LedgerCalls:
        """Returns what the ledger has of a session; raises Unauthenticated, NotFound."""
        place = place_of(session_id)
        cached = self._cache.find(place)
        found = await self._sessions.get(*place, cached.known)
        digest = hashlib.sha256(key.encode()).hexdigest()
        if not hmac.compare_digest(digest, found.key_digest):
            raise Unauthenticated("API key: it does not belong to this session")
        if not found.continued:
            cached = CachedCalls()
        cached.add(found.calls)
        self._cache.keep(place, cached)
        return LedgerCalls(self._sessions, found, place[1], cached, lambda: self._cache.drop(place))

    def _of(self, found: pb.GetSessionResponse) -> Model:
        """The model as this session may see it."""
        if self._model is None:
            raise Unavailable("the rollout worker is starting: try again in 1 s")
        generation, tokenizer, renderer = self._model

        async def generate(request: LLMRequest) -> list[LLMResponse]:
            responses = [
                LLMResponse(list(request.input_ids), [], [], [], StopReason.ABORT)
                for _ in range(request.gconfig.n_samples)
            ]
            renewing = asyncio.create_task(self._renew(found))
            wait_s = self._config.request_timeout_s
            try:
                async with self._turns.turn(request.affinity_key, len(responses), wait_s):
                    await generation.generate(
                        request, responses, min_version=found.policy_version, avoid=()
                    )
            finally:
                renewing.cancel()
            return responses

        return Model(
            "areal",
            generate,
            tokenizer,
            renderer,
            self._config.gconfig,
            context_length=self._config.context_length,
            on_bug=self._bug,
        )

    async def _renew(self, found: pb.GetSessionResponse) -> None:
        """Keeps a session while a call is answered: its agent waits, and is not silent."""
        lease = found.lease.task_id, found.lease.token
        while True:
            await asyncio.sleep(found.idle.ToMilliseconds() / 1000 / 3)
            with suppress(ArealError):  # the answer's own record says what is wrong
                await self._buffer.renew_leases(_WORKER, [lease])

    # ------------------------------------------------------------ ending

    async def _end(self, calls: LedgerCalls, reward: Score | None) -> str:
        """Ends an attempt, and with the last one the task; returns the task's state."""
        found = calls.found
        task_id = found.record.task.task_id
        state = STATE_FROM_PB[found.record.state]
        if state in _MERGED and not found.expired:
            return state.value
        calls.check_open()
        if not found.ended:
            if reward is not None:
                await calls.reward(None, reward)
                found.outcome = reward
                found.outcome_parts.clear()
                found.outcome_parts.update(reward.parts)
            await asyncio.to_thread(_merged, calls)  # a missing reward is reported now
        if await calls.end():
            return state.value
        task, token = task_from_pb(found.record.task), found.lease.token
        lease = Lease(task, token, found.policy_version, 0.0, attempts=found.attempts)
        try:
            return await self._complete(lease)
        except LeaseLost:  # it took too long: a worker has leased it, and has perhaps completed it
            state = STATE_FROM_PB[(await self._sessions.get(task_id, 0)).record.state]
            if state not in _MERGED and state is not TaskState.RUNNING:
                raise
            return state.value

    async def group(self, lease: Lease) -> TrajectoryGroup | None:
        """Returns the group of a session's attempts that have ended; None: no call was answered.

        Raises:
            LeaseLost: The task has ended.
        """
        task_id, trajectories = lease.task.task_id, list[Trajectory]()
        ended, began_s = False, time.time()
        for attempt in range(lease.attempts):
            self._cache.drop((task_id, attempt))
            found, cached = await self._sessions.get(task_id, attempt), CachedCalls()
            if found.ended:
                ended = True
                began_s = found.record.submit_time.ToMilliseconds() / 1000
                cached.add(found.calls)
                each = LedgerCalls(self._sessions, found, attempt, cached)
                if (merged := await asyncio.to_thread(_merged, each)) is not None:
                    if self._model is not None:
                        await asyncio.to_thread(mark, merged, self._model[1])
                    trajectories += merged.trajectories
                    self._observer.dropped_answers(merged.dropped)
                    self._observer.conversations_split(merged.trajectories)
        if not ended:  # what it recorded is released when it ends
            raise LeaseLost(f"session {task_id}: it has ended meanwhile")
        if not trajectories:
            return None
        for index, trajectory in enumerate(trajectories):
            trajectory.trajectory_id = f"{task_id}.{lease.token}.{index}"
        group = TrajectoryGroup(task_id, trajectories, lease.task.traceparent)
        group.episode_s = max(0.0, time.time() - began_s)
        return group

    async def _complete(self, lease: Lease) -> str:
        task_id, token = lease.task.task_id, lease.token
        group = await self.group(lease)
        end = judge(
            group,
            lease,
            dynamic_sampling=self._config.dynamic_sampling,
            reject_single=self._config.reject_single,
        )
        if isinstance(end, Rejection):
            await self._buffer.reject_task(task_id, token, end.why.reason, end.group)
            return TaskState.REJECTED.value
        try:
            await self._buffer.complete_task(task_id, token, end, _WORKER)
        except InvalidInput as error:
            detail = f"the ledger refuses the group: {error}"
            await self._buffer.return_task(
                task_id, token, Return(ReturnCause.WORKFLOW_ERROR, detail)
            )
            raise
        state = STATE_FROM_PB[(await self._sessions.get(task_id, 0)).record.state]
        return state.value


def _state(session_id: str, calls: LedgerCalls) -> dict[str, Any]:
    """Returns the body that a GET shows."""
    found = calls.found
    return {
        "id": session_id,
        "task_id": found.record.task.task_id,
        "state": calls.state.value,
        "reason": found.record.reason,
        "attempts": found.attempts,
        "ended": found.ended,
        "calls": calls.count,
        "reward": found.outcome if found.HasField("outcome") else None,
        "parts": dict(found.outcome_parts),
        "policy_version": found.policy_version,
    }


def _merged(calls: LedgerCalls) -> Merged | None:
    """Returns one attempt; None: no call was answered. Raises InvalidInput without a reward."""
    found = calls.found
    outcome = Score(found.outcome, found.outcome_parts) if found.HasField("outcome") else None
    try:
        return merge(calls.calls(), outcome)
    except WorkflowError:  # the agent failed before its first answer
        return None

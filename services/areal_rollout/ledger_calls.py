"""The calls of an agent's session, kept in the ledger: any worker continues any session."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from areal.agents.headers import Repeats
from areal.agents.tree import Call
from areal.clients.buffer.sessions import BufferSessions
from areal.errors import LeaseLost, NotFound, Unavailable
from areal.protocol import routes
from areal.protocol.trajectories import STATE_FROM_PB
from areal.types import LLMResponse, Score, StopReason, TaskState
from areal.v1 import buffer_service_pb2 as pb
from areal_rollout.session_cache import CachedCalls

_LAST, _CHUNK = 16, 1024
"""How many ids are compared first, and how many at once after that."""


class LedgerCalls:
    """A `CallStore` for one request: what the ledger has, and what the request adds.

    A prompt is stored from where it goes beyond the call that it extends: a session of many turns
    is stored once, not once a turn.
    """

    def __init__(
        self,
        buffer: BufferSessions,
        found: pb.GetSessionResponse,
        attempt: int,
        cached: CachedCalls,
        lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes the session as it was when the request came.

        Args:
            buffer: Where the calls are recorded.
            found: The session's state; its calls are in `cached`.
            attempt: Its number.
            cached: The calls, which this request adds its own to.
            lost: Called when the ledger does not have a call that `cached` has.
        """
        self._buffer = buffer
        self.found = found
        """What the ledger knows of the session."""
        self._attempt = attempt
        self._cached, self._lost = cached, lost
        self._extended: tuple[int, list[int]] | None = None
        self._call_id = ""
        self._begun: list[int] = []

    async def begin(self, prompt: Sequence[int], n: int, repeats: Repeats) -> int:
        """See `areal.agents.calls.CallStore`."""
        self._call_id = uuid.uuid4().hex
        stored = pb.SessionPrompt(
            call_id=self._call_id, retry=repeats.retry, request_key=repeats.key
        )
        ids = list(prompt)
        number, length = self._extends(ids)
        if number is not None:
            stored.extends = number
        stored.token_ids.extend(ids[length:])
        begin = pb.SessionBegin(answers=n, prompt=stored)
        first = (await self._update(begin=begin)).number
        new = [pb.SessionCall(number=first, prompt=stored)]
        new += [pb.SessionCall(number=first + more) for more in range(1, n)]
        self._cached.add(new)
        self._begun = [call.number for call in new]
        return first

    async def record(
        self,
        number: int,
        response: LLMResponse,
        text: str,
        turns: Sequence[str],
        kept: str = "",
        outline: str = "",
    ) -> None:
        """See `areal.agents.calls.CallStore`."""
        answer = pb.SessionAnswer(
            token_ids=response.output_tokens,
            logprobs=response.output_logprobs,
            versions=response.output_versions,
            stop_reason=response.stop_reason,
            text=text,
            turn=turns[0] if turns else "",
            turns_too=turns[1:],
            kept=kept,
            latency_s=response.latency_s,
            servers=response.servers,
            outline=outline,
        )
        self._add_routes(answer, number, response)
        record = pb.SessionRecord(number=number, answer=answer, call_id=self._call_id)
        await self._update(record=record)
        calls = self._cached.calls
        if number < len(calls) and self._cached.prompt(number).call_id == self._call_id:
            self._cached.add([pb.SessionCall(number=number, answer=answer)])

    async def find(self, turn: str, prefer: int | None = None) -> int | None:
        """See `areal.agents.calls.CallStore`."""
        ended = [
            c.number
            for c in self._cached.calls
            if c.HasField("answer") and (c.answer.turn == turn or turn in c.answer.turns_too)
        ]
        return prefer if prefer in ended else ended[-1] if ended else None

    async def whole(self, number: int) -> list[int]:
        """See `areal.agents.calls.CallStore`."""
        whole = [*self._prompt(number), *self._cached.calls[number].answer.token_ids]
        self._extended = number, whole
        return list(whole)

    async def kept(self, number: int) -> str:
        """See `areal.agents.calls.CallStore`."""
        calls = self._cached.calls
        return calls[number].answer.kept if number < len(calls) else ""

    async def delivered(self, numbers: Sequence[int]) -> None:
        """Does nothing: the process that sends the answer also stores the `receipt`."""

    @property
    def receipt(self) -> bytes:
        """An UpdateSessionRequest that records this request's answers as delivered, or nothing."""
        if not self._begun:
            return b""
        delivered = pb.SessionDelivered(call_id=self._call_id, numbers=self._begun)
        return pb.UpdateSessionRequest(
            lease=self.found.lease, attempt=self._attempt, delivered=delivered
        ).SerializeToString()

    async def reward(self, number: int | None, value: float) -> None:
        """See `areal.agents.calls.CallStore`."""
        parts = value.parts if isinstance(value, Score) else {}
        await self._update(reward=pb.SessionReward(number=number, value=value, parts=parts))

    async def end(self) -> int:
        """Ends the attempt; returns how many attempts of the task have not ended."""
        return (await self._update(end=pb.SessionEnd())).open_attempts

    def check_open(self) -> None:
        """Raises LeaseLost once the session has ended; says how."""
        record = self.found.record
        if self.state is not TaskState.RUNNING:
            why = f": {record.reason}" if record.reason else ""
            raise LeaseLost(f"session {record.task.task_id} is {self.state}{why}")

    @property
    def state(self) -> TaskState:
        """The state of the task; expired if the group is made without this attempt."""
        return TaskState.EXPIRED if self.found.expired else STATE_FROM_PB[self.found.record.state]

    @property
    def count(self) -> int:
        """Returns the number of calls."""
        return len(self._cached.calls)

    def calls(self) -> list[Call]:
        """Returns the calls in the form that `areal.agents.tree.merge` takes."""
        return [
            Call(
                response=LLMResponse(
                    input_tokens=self._prompt(call.number),
                    output_tokens=list(call.answer.token_ids),
                    output_logprobs=list(call.answer.logprobs),
                    output_versions=list(call.answer.versions),
                    stop_reason=StopReason(call.answer.stop_reason or StopReason.ABORT),
                    latency_s=call.answer.latency_s,
                    servers=list(call.answer.servers),
                    routed_experts=self._routes(call.number),
                ),
                retry=self._cached.prompt(call.number).retry,
                key=self._cached.prompt(call.number).request_key,
                delivered=call.delivered,
                reward=Score(call.reward, call.reward_parts) if call.HasField("reward") else None,
                text=call.answer.text,
                outline=call.answer.outline,
            )
            for call in self._cached.calls
        ]

    def _add_routes(self, answer: pb.SessionAnswer, number: int, response: LLMResponse) -> None:
        """Adds the routes of an answer, from where those of the call that it extends end."""
        given = response.routed_experts
        if given is None:
            return
        given = given[: len(response.input_tokens) + len(response.output_tokens)]
        start, calls = 0, self._cached.calls
        if number < len(calls) and self._cached.prompt(number).call_id == self._call_id:
            prompt = self._cached.prompt(number)
            if prompt.HasField("extends"):
                before = self._routes(prompt.extends)
                start = 0 if before is None else min(len(before), len(given))
        if (own := routes.tensor_of(given[start:])) is not None:
            answer.routed_experts.CopyFrom(own)
            answer.routed_start = start

    def _routes(self, number: int) -> npt.NDArray[Any] | None:
        """The routes of a call's first tokens; None: they are not known."""
        calls, chain = self._cached.calls, [number]
        while calls[chain[-1]].answer.routed_start:
            prompt = self._cached.prompt(chain[-1])
            if not prompt.HasField("extends"):
                return None
            chain.append(prompt.extends)
        whole: npt.NDArray[Any] | None = None
        for each in reversed(chain):
            answer = calls[each].answer
            if not answer.HasField("routed_experts"):
                return None
            own, start = (
                routes.array_of(answer.routed_experts, "routed_experts"),
                answer.routed_start,
            )
            if start and (whole is None or len(whole) < start or whole.shape[1:] != own.shape[1:]):
                return None
            whole = own if whole is None else np.concatenate([whole[:start], own])
        return whole

    def _extends(self, ids: list[int]) -> tuple[int | None, int]:
        """The answer that ends the longest beginning of `ids`, and how long that is."""
        if self._extended is not None:
            number, whole = self._extended
            if ids[: len(whole)] == whole:
                return number, len(whole)
        # Token ids of the agent's own, or a history that was rendered again.
        best: tuple[int | None, int] = None, 0
        ends: dict[int, int] = {}
        for call in self._cached.calls:
            prompt = self._cached.prompt(call.number)
            start = ends.get(prompt.extends) if prompt.HasField("extends") else 0
            if start is None or not call.answer.token_ids:
                continue
            end = _end_of(ids, start, (prompt.token_ids, call.answer.token_ids))
            if end is not None:
                ends[call.number] = end
                best = max(best, (call.number, end), key=lambda each: each[1])
        return best

    def _prompt(self, number: int) -> list[int]:
        """The whole prompt of a call."""
        parts: list[Sequence[int]] = []
        prompt = self._cached.prompt(number)
        parts.append(prompt.token_ids)
        while prompt.HasField("extends"):
            before = self._cached.calls[prompt.extends]
            prompt = self._cached.prompt(before.number)
            parts += [before.answer.token_ids, prompt.token_ids]
        whole: list[int] = []
        for part in reversed(parts):
            whole.extend(part)
        return whole

    async def _update(
        self,
        *,
        begin: pb.SessionBegin | None = None,
        record: pb.SessionRecord | None = None,
        reward: pb.SessionReward | None = None,
        end: pb.SessionEnd | None = None,
    ) -> pb.UpdateSessionResponse:
        self.check_open()
        request = pb.UpdateSessionRequest(
            lease=self.found.lease,
            attempt=self._attempt,
            begin=begin,
            record=record,
            reward=reward,
            end=end,
        )
        try:
            return await self._buffer.update(request)
        except NotFound as error:
            if begin is None and record is None:
                raise
            # Redis came back without its latest writes, which this worker still has.
            self._lost()
            raise Unavailable(f"{error}: try again in 1 s") from None


def _end_of(ids: list[int], start: int, parts: Sequence[Sequence[int]]) -> int | None:
    """Returns where consecutive parts end in `ids`; None: they are not at `start`.

    In a session in which every answer splits, each call has a whole prompt, so few of its ids may
    be looked at. An agent that rewrites its answers changes what is last, a clock in the system
    prompt what is first.
    """
    end = start + sum(map(len, parts))
    last = list(parts[-1][-_LAST:])
    if end > len(ids) or ids[end - len(last) : end] != last:
        return None
    for part in parts:
        for at in range(0, len(part), _CHUNK):
            piece = list(part[at : at + _CHUNK])
            if ids[start : start + len(piece)] != piece:
                return None
            start += len(piece)
    return end

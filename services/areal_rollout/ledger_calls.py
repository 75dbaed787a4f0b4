"""The calls of an agent's session, kept in the ledger: any worker continues any session."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from areal.agents.tree import Call
from areal.clients.buffer.sessions import BufferSessions
from areal.errors import LeaseLost
from areal.protocol.trajectories import STATE_FROM_PB
from areal.types import LLMResponse, Score, StopReason, TaskState
from areal.v1 import buffer_service_pb2 as pb


class LedgerCalls:
    """A `CallStore` for one request: what the ledger has, and what the request adds.

    A prompt is stored from where it goes beyond the call that it extends: a session of many turns
    is stored once, not once a turn.
    """

    def __init__(self, buffer: BufferSessions, found: pb.GetSessionResponse, attempt: int) -> None:
        """`found`: the session as it was when the request came."""
        self._buffer = buffer
        self.found = found
        """What the ledger has."""
        self._attempt = attempt
        self._extended: tuple[int, list[int]] | None = None

    async def begin(self, prompt: Sequence[int], n: int, *, retry: bool) -> int:
        """See `areal.agents.calls.CallStore`."""
        begin = pb.SessionBegin(call_id=uuid.uuid4().hex, answers=n)
        begin.prompt.retry = retry
        ids = list(prompt)
        if self._extended is not None:
            number, whole = self._extended
            if ids[: len(whole)] == whole:
                begin.prompt.extends = number
                ids = ids[len(whole) :]
        begin.prompt.token_ids.extend(ids)
        return (await self._update(begin=begin)).number

    async def record(
        self, number: int, response: LLMResponse, text: str, turn: str, kept: str = ""
    ) -> None:
        """See `areal.agents.calls.CallStore`."""
        answer = pb.SessionAnswer(
            token_ids=response.output_tokens,
            logprobs=response.output_logprobs,
            versions=response.output_versions,
            stop_reason=response.stop_reason,
            text=text,
            turn=turn,
            kept=kept,
        )
        await self._update(record=pb.SessionRecord(number=number, answer=answer))

    async def find(self, turn: str, prefer: int | None = None) -> int | None:
        """See `areal.agents.calls.CallStore`."""
        ended = [
            c.number for c in self.found.calls if c.HasField("answer") and c.answer.turn == turn
        ]
        return prefer if prefer in ended else ended[-1] if ended else None

    async def whole(self, number: int) -> list[int]:
        """See `areal.agents.calls.CallStore`."""
        whole = [*self._prompt(number), *self.found.calls[number].answer.token_ids]
        self._extended = number, whole
        return list(whole)

    async def kept(self, number: int) -> str:
        """See `areal.agents.calls.CallStore`."""
        calls = self.found.calls
        return calls[number].answer.kept if number < len(calls) else ""

    async def delivered(self, numbers: Sequence[int]) -> None:
        """Does nothing: another process sends the answer."""

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
        state = STATE_FROM_PB[record.state]
        if state is not TaskState.RUNNING:
            why = f": {record.reason}" if record.reason else ""
            raise LeaseLost(f"session {record.task.task_id} is {state}{why}")

    def calls(self) -> list[Call]:
        """As `areal.agents.tree.merge` takes them."""
        return [
            Call(
                response=LLMResponse(
                    input_tokens=self._prompt(call.number),
                    output_tokens=list(call.answer.token_ids),
                    output_logprobs=list(call.answer.logprobs),
                    output_versions=list(call.answer.versions),
                    stop_reason=StopReason(call.answer.stop_reason or StopReason.ABORT),
                ),
                retry=call.prompt.retry,
                delivered=False,
                reward=Score(call.reward, call.reward_parts) if call.HasField("reward") else None,
                text=call.answer.text,
            )
            for call in self.found.calls
        ]

    def _prompt(self, number: int) -> list[int]:
        """The whole prompt of a call."""
        parts: list[Sequence[int]] = []
        prompt = self.found.calls[number].prompt
        parts.append(prompt.token_ids)
        while prompt.HasField("extends"):
            before = self.found.calls[prompt.extends]
            prompt = before.prompt
            parts += [before.answer.token_ids, prompt.token_ids]
        return [token for part in reversed(parts) for token in part]

    async def _update(
        self,
        *,
        begin: pb.SessionBegin | None = None,
        record: pb.SessionRecord | None = None,
        reward: pb.SessionReward | None = None,
        end: pb.SessionEnd | None = None,
    ) -> pb.UpdateSessionResponse:
        self.check_open()
        return await self._buffer.update(
            pb.UpdateSessionRequest(
                lease=self.found.lease,
                attempt=self._attempt,
                begin=begin,
                record=record,
                reward=reward,
                end=end,
            )
        )

"""What a session remembers of its calls, kept in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from areal.agents.tree import Call, Merged, merge
from areal.errors import NotFound
from areal.types import LLMResponse, StopReason


class CallStore(Protocol):
    """Where the calls of one session are."""

    async def begin(self, prompt: Sequence[int], n: int, *, retry: bool) -> int:
        """Notes `n` answers to come; returns the number of the first. In order of arrival."""
        ...

    async def record(
        self, number: int, response: LLMResponse, text: str, turn: str, kept: str = ""
    ) -> None:
        """An answer as sampled.

        Args:
            number: Of the answer.
            response: Its ids.
            text: What people see of it.
            turn: The digest of the conversation that it ends; may be empty.
            kept: What `kept` returns for it.
        """
        ...

    async def find(self, turn: str, prefer: int | None = None) -> int | None:
        """The answer that ended this conversation: `prefer` if it did, else the latest."""
        ...

    async def whole(self, number: int) -> list[int]:
        """Prompt and answer that `find` has found."""
        ...

    async def kept(self, number: int) -> str:
        """What was recorded with an answer; empty: nothing, or there is no such answer."""
        ...

    async def delivered(self, numbers: Sequence[int]) -> None:
        """These answers left for the agent."""
        ...

    async def reward(self, number: int | None, value: float) -> None:
        """The reward of one answer, or (None) of the whole session; raises NotFound."""
        ...


class Calls:
    """A `CallStore` for an agent that runs, and dies, with this process."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._turns: dict[int, str] = {}
        self._ended_by: dict[str, int] = {}
        self._kept: dict[int, str] = {}
        self.outcome: float | None = None
        """The reward that the agent posted for all of it."""

    async def begin(self, prompt: Sequence[int], n: int, *, retry: bool) -> int:
        """See `CallStore`."""
        nothing = LLMResponse(list(prompt), [], [], [], StopReason.ABORT)
        self._calls += [Call(nothing, retry, delivered=False) for _ in range(n)]
        return len(self._calls) - n

    async def record(
        self, number: int, response: LLMResponse, text: str, turn: str, kept: str = ""
    ) -> None:
        """See `CallStore`."""
        self._calls[number] = replace(self._calls[number], response=response, text=text)
        if kept:
            self._kept[number] = kept
        if turn:
            self._turns[number] = turn
            self._ended_by[turn] = max(number, self._ended_by.get(turn, number))

    async def find(self, turn: str, prefer: int | None = None) -> int | None:
        """See `CallStore`."""
        if prefer is not None and self._turns.get(prefer) == turn:
            return prefer
        return self._ended_by.get(turn)

    async def whole(self, number: int) -> list[int]:
        """See `CallStore`."""
        response = self._calls[number].response
        return [*response.input_tokens, *response.output_tokens]

    async def kept(self, number: int) -> str:
        """See `CallStore`."""
        return self._kept.get(number, "")

    async def delivered(self, numbers: Sequence[int]) -> None:
        """See `CallStore`."""
        for number in numbers:
            self._calls[number] = replace(self._calls[number], delivered=True)

    async def reward(self, number: int | None, value: float) -> None:
        """See `CallStore`."""
        if number is None:
            self.outcome = value
            return
        if not 0 <= number < len(self._calls):
            raise NotFound(f"answer {number}: the session has {len(self._calls)}")
        self._calls[number] = replace(self._calls[number], reward=value)

    def merged(self, outcome: float | None) -> Merged:
        """What the session comes to; see `areal.agents.tree.merge`."""
        return merge(self._calls, outcome)

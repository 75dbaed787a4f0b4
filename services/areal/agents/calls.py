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

    async def record(self, number: int, response: LLMResponse, text: str, turn: str) -> None:
        """An answer as sampled. `turn`: the digest of the conversation that it ends; may be empty.

        Of several calls that end the same conversation the latest stands for it.
        """
        ...

    async def find(self, turn: str) -> list[int] | None:
        """Prompt and answer of the call that ended this conversation."""
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
        self._ended_by: dict[str, int] = {}
        self.outcome: float | None = None
        """The reward that the agent posted for all of it."""

    async def begin(self, prompt: Sequence[int], n: int, *, retry: bool) -> int:
        """See `CallStore`."""
        nothing = LLMResponse(list(prompt), [], [], [], StopReason.ABORT)
        self._calls += [Call(nothing, retry, delivered=False) for _ in range(n)]
        return len(self._calls) - n

    async def record(self, number: int, response: LLMResponse, text: str, turn: str) -> None:
        """See `CallStore`."""
        self._calls[number] = replace(self._calls[number], response=response, text=text)
        if turn:
            self._ended_by[turn] = max(number, self._ended_by.get(turn, number))

    async def find(self, turn: str) -> list[int] | None:
        """See `CallStore`."""
        number = self._ended_by.get(turn)
        if number is None:
            return None
        response = self._calls[number].response
        return [*response.input_tokens, *response.output_tokens]

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

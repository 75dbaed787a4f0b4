"""What a session remembers of its calls, kept in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from areal.agents.headers import Repeats
from areal.agents.tree import Call, Merged, merge
from areal.errors import NotFound, WorkflowError
from areal.types import LLMResponse, StopReason


class CallStore(Protocol):
    """Stores the calls of one session."""

    async def begin(self, prompt: Sequence[int], n: int, repeats: Repeats) -> int:
        """Reserves numbers for `n` answers, in order of arrival; returns the first number."""
        ...

    async def record(
        self,
        number: int,
        response: LLMResponse,
        text: str,
        turns: Sequence[str],
        kept: str = "",
        outline: str = "",
    ) -> None:
        """Stores an answer as it was sampled.

        Args:
            number: The answer's number.
            response: The answer's token ids.
            text: The text that people see.
            turns: Digests of the conversation that ends with this answer, one for each way in
                which clients send the answer back; may be empty.
            kept: Data that `kept` returns for this answer.
            outline: The outline of the conversation, as `Outline.write` writes it; may be empty.
        """
        ...

    async def find(self, turn: str, prefer: int | None = None) -> int | None:
        """Finds the answer that ended this conversation: `prefer` if it did, else the latest."""
        ...

    async def whole(self, number: int) -> list[int]:
        """Returns prompt and answer that `find` has found."""
        ...

    async def kept(self, number: int) -> str:
        """Returns the data recorded with an answer; empty if there is none."""
        ...

    async def delivered(self, numbers: Sequence[int]) -> None:
        """Marks these answers as sent to the agent."""
        ...

    async def reward(self, number: int | None, value: float) -> None:
        """Sets the reward of one answer, or (None) of the whole session; a `Score` has parts.

        Raises:
            NotFound: There is no such answer.
        """
        ...


class Calls:
    """A `CallStore` for an agent that runs and ends with this process."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._turns: dict[int, set[str]] = {}
        self._ended_by: dict[str, int] = {}
        self._kept: dict[int, str] = {}
        self.outcome: float | None = None
        """The reward that the agent posted for the whole session."""

    async def begin(self, prompt: Sequence[int], n: int, repeats: Repeats) -> int:
        """See `CallStore`."""
        nothing = LLMResponse(list(prompt), [], [], [], StopReason.ABORT)
        self._calls += [
            Call(nothing, repeats.retry, repeats.key, delivered=False) for _ in range(n)
        ]
        return len(self._calls) - n

    async def record(
        self,
        number: int,
        response: LLMResponse,
        text: str,
        turns: Sequence[str],
        kept: str = "",
        outline: str = "",
    ) -> None:
        """See `CallStore`."""
        self._calls[number] = replace(
            self._calls[number], response=response, text=text, outline=outline
        )
        if kept:
            self._kept[number] = kept
        self._turns[number] = set(turns)
        for turn in turns:
            self._ended_by[turn] = max(number, self._ended_by.get(turn, number))

    async def find(self, turn: str, prefer: int | None = None) -> int | None:
        """See `CallStore`."""
        if prefer is not None and turn in self._turns.get(prefer, ()):
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
            raise NotFound(f"answer {number}: the session has only {len(self._calls)} answers")
        self._calls[number] = replace(self._calls[number], reward=value)

    def zeros(self) -> Merged | None:
        """Returns the trajectories of a failed run, with the reward 0; None: it had no answer."""
        self._calls = [replace(call, reward=None) for call in self._calls]
        try:
            return merge(self._calls, 0.0)
        except WorkflowError:
            return None

    def merged(self, outcome: float | None) -> Merged:
        """Returns the session's trajectories; see `areal.agents.tree.merge`."""
        return merge(self._calls, outcome)

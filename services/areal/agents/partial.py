"""The part of an unfinished answer that can be streamed: what no later token can change.

    <think> reasoning </think> content <tool_call> … </tool_call>
            streamed           streamed            sent when the answer is complete

Also held back: text that may be the start of a tag or of a stop string, trailing blanks, and
incomplete UTF-8 characters. So the streamed text is always a prefix of the final text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from areal.tokenizer import Tokenizer

_OPEN, _CLOSE, _CALL = "<think>", "</think>", "<tool_call>"
_INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class AnswerDelta:
    """New text of one of a request's answers."""

    first: int
    """Number of the request's first answer."""
    prompt_tokens: int
    index: int
    """Position of this answer among the request's answers."""
    reasoning: str
    """Text to append to the reasoning."""
    content: str
    """Text to append to the content."""


OnDelta = Callable[[AnswerDelta], None]


def opens_reasoning(prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether the prompt ends with an opening tag of reasoning, as some chat templates do."""
    return tokenizer.decode(list(prompt[-8:])).rstrip().endswith(_OPEN)


def split_reasoning(text: str, opened: bool) -> tuple[str, str]:
    """Splits an answer into reasoning and content; `opened`: the prompt opened the reasoning."""
    bare = text.lstrip()
    if not opened and not bare.startswith(_OPEN):
        return "", text
    reasoning, _, content = bare.removeprefix(_OPEN).partition(_CLOSE)
    return reasoning, content


class PartialAnswer:
    """One answer while it is sampled."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        *,
        opened: bool = False,
        calls: bool = False,
        plain: bool = False,
    ) -> None:
        """Starts empty.

        Args:
            tokenizer: The model's.
            stop: Texts that end the answer.
            opened: Whether the prompt opened the reasoning (`opens_reasoning`).
            calls: Whether the agent offered tools.
            plain: Whether all text is content, including outer blanks.
        """
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        self._opened, self._calls, self._plain = opened, calls, plain
        self._ids: list[int] = []
        self.reasoning = self.content = ""
        """What has been streamed."""

    def update(self, ids: Sequence[int]) -> tuple[str, str]:
        """Takes all ids sampled so far; returns the new text of reasoning and of content."""
        self._ids = list(ids)
        text = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        text = text.rstrip(_INCOMPLETE_CHARACTER)
        ends = [text.index(each) for each in self._stop if each in text]
        text = text[: min(ends)] if ends else _without_start_of(text, self._stop)
        reasoning, content = ("", text) if self._plain else self._split(text)
        before = len(self.reasoning), len(self.content)
        if reasoning.startswith(self.reasoning):
            self.reasoning = reasoning
        if content.startswith(self.content):
            self.content = content
        return self.reasoning[before[0] :], self.content[before[1] :]

    def agrees_with(self, ids: Sequence[int]) -> bool:
        """Whether the final ids begin with those that were streamed."""
        return list(ids[: len(self._ids)]) == self._ids

    def _split(self, text: str) -> tuple[str, str]:
        if not self._opened and _OPEN.startswith(text.lstrip()):
            return "", ""
        reasoning, content = split_reasoning(text, self._opened)
        if _CLOSE not in text:
            reasoning = _without_start_of(reasoning, [_CLOSE])
        if self._calls:
            # Llama writes a call as bare JSON, which is then the whole answer.
            bare_call = content.lstrip().startswith("{")
            content = content.partition(_CALL)[0]
            content = "" if bare_call else _without_start_of(content, [_CALL])
        return reasoning.strip(), content.strip()


def _without_start_of(text: str, marks: Sequence[str]) -> str:
    """Cuts the longest suffix of the text that may be the start of a mark."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for size in range(min(len(text), longest), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return text[:-size]
    return text

"""The part of an unfinished answer that can be streamed: what no later token can change.

    <think> reasoning </think> content <tool_call> … </tool_call>
            streamed           streamed            sent when the answer is complete

Also held back: text that may be the start of a tag or of a stop string, trailing blanks, and
incomplete UTF-8 characters. So the streamed text is always a prefix of the final text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from areal.tokenizer import Tokenizer
from areal.workflows.answer_text import AnswerText
from areal.workflows.reasoning import HEADERS, MESSAGE_END, THOUGHTS, closes_of, opening_of
from areal.workflows.tool_text import MARKS

_TAGS = (*THOUGHTS, *HEADERS)
_INCOMPLETE_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_LONGEST_WAIT = 64
"""Ids without a complete character at their end, after which no character is waited for."""


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


class IncrementalText:
    """Token ids to text, step by step; the cost of a step does not grow with what came before.

    Only the ids since the last complete character are decoded, after those of the step before:
    some tokenizers strip a leading blank, which is then that of the known ids.
    """

    def __init__(self, tokenizer: Tokenizer, plain: bool = False) -> None:
        """`plain`: see `AnswerText`."""
        self._tokenizer = tokenizer
        self._has = AnswerText(tokenizer, plain=plain).has
        self._known: list[int] = []
        self._new: list[int] = []
        self._given = 0
        """Number of characters of both texts that were returned or are held back."""
        self._held = ""  # is no characters, and is returned with the next one

    def add(self, ids: Sequence[int]) -> str:
        """Returns the new text, up to the last character that no later id can change."""
        # The others have no text, however many there are.
        self._new += [each for each in ids if self._has(each)]
        stuck = len(self._new) > _LONGEST_WAIT
        for waiting in range(4 if stuck else 1):  # a character has up to four bytes
            size = len(self._new) - waiting
            text = self._decode([*self._known, *self._new[:size]])
            if len(text) > self._given and not text.endswith(_INCOMPLETE_CHARACTER):
                added = self._take(text, len(text))
                self._known, self._new = self._new[:size], self._new[size:]
                self._given = len(self._decode(self._known))
                return added
        text = self._decode([*self._known, *self._new])
        added = self._take(text, len(text.rstrip(_INCOMPLETE_CHARACTER)))
        if stuck:
            self._forget(text)
        return added

    def _take(self, text: str, end: int) -> str:
        """The text up to there that was not returned; nothing, if all of it was."""
        if end <= self._given:
            return ""
        added, self._held, self._given = self._held + text[self._given : end], "", end
        return added

    def _forget(self, text: str) -> None:
        """Begins again where ids have become no character, and only the last still may."""
        self._held += text[self._given : -1]
        # Sentencepiece reads a run of bytes as a whole; one that is twice in it spoils it.
        latest = reversed([*self._known, *self._new])
        bytes_ = (each for each in latest if self._decode([each]) == _INCOMPLETE_CHARACTER)
        byte = next(bytes_, None)
        spoiled = [] if byte is None else [byte, byte]
        self._known, self._new = [*spoiled, *self._new[-_LONGEST_WAIT // 2 :]], []
        self._given = max(0, len(self._decode(self._known)) - 1)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)


class _Shown:
    """Text that is streamed without the blanks around it."""

    def __init__(self, *, strip: bool, lead: bool = False) -> None:
        """`lead`: blanks at the start are shown nevertheless."""
        self._strip, self._lead = strip, lead
        self._parts, self._blanks = list[str](), list[str]()

    @property
    def text(self) -> str:
        return "".join(self._parts)

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, text: str) -> str:
        """Returns what can be streamed now."""
        if self._strip:
            if not self._parts and not self._lead:
                text = text.lstrip()
            whole, text = text, text.rstrip()
            blanks = whole[len(text) :]
            if text:
                text = "".join([*self._blanks, text])
                self._blanks.clear()
            if blanks:
                self._blanks.append(blanks)
        if text:
            self._parts.append(text)
        return text


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
        begun: bool = False,
    ) -> None:
        """Starts empty.

        Args:
            tokenizer: The model's.
            stop: Texts that end the answer.
            opened: Whether the prompt opened the reasoning (`opens_reasoning`).
            calls: Whether the agent offered tools.
            plain: Whether all text is content, including outer blanks.
            begun: Whether the agent began the answer, so that blanks at its start count.
        """
        self._stop, self._opened, self._calls = tuple(stop), opened, calls and not plain
        self._ids: list[int] = []
        self._text = IncrementalText(tokenizer, plain)
        self._held = ""  # may be the start of a stop string
        self._stopped = False
        self._pending = ""  # of what is before a stop string: may be the start of a tag
        self._part: Literal["start", "reasoning", "content", "end"] = (
            "content" if plain else "start"
        )
        self._closes, self._thoughts = tuple[str, ...](), 0  # what ends a thought; thoughts ended
        self._reasoning = _Shown(strip=True)
        self._content = _Shown(strip=not plain, lead=begun and not opened)

    @property
    def reasoning(self) -> str:
        """The reasoning that has been streamed."""
        return self._reasoning.text

    @property
    def content(self) -> str:
        """The content that has been streamed."""
        return self._content.text

    def update(self, ids: Sequence[int]) -> tuple[str, str]:
        """Takes all ids sampled so far; returns the new text of reasoning and of content."""
        new = list(ids[len(self._ids) :])
        self._ids += new
        return self._split(self._before_stop(self._text.add(new)))

    def agrees_with(self, ids: Sequence[int]) -> bool:
        """Whether the final ids begin with those that were streamed."""
        return list(ids[: len(self._ids)]) == self._ids

    def _before_stop(self, text: str) -> str:
        """The new text that is before any stop string."""
        if self._stopped:
            return ""
        text = self._held + text
        ends = [text.index(each) for each in self._stop if each in text]
        self._stopped = bool(ends)
        before = text[: min(ends)] if ends else _without_start_of(text, self._stop)
        self._held = text[len(before) :]
        return before

    def _split(self, text: str) -> tuple[str, str]:
        """Returns how much of reasoning and content can be streamed, given the text so far."""
        self._pending += text
        reasoning, content = list[str](), ""
        while self._part in ("start", "reasoning"):
            if self._part == "start" and not self._begins():
                break
            if self._part == "reasoning":
                thought, closed = self._until(self._closes)
                reasoning.append(thought)
                if not closed:
                    break
                self._part = "start" if closed == MESSAGE_END else "content"
                self._opened = False
                self._thoughts += 1
        if self._part == "content":
            content = self._of_content()
        return self._reasoning.add("".join(reasoning)), self._content.add(content)

    def _begins(self) -> bool:
        """Whether the pending text tells what begins there; then it is without its tag."""
        bare = self._pending if self._thoughts else self._pending.lstrip()
        if any(tag.startswith(bare) and tag != bare for tag in _TAGS):
            self._pending = bare
            return False
        tag = opening_of(bare, self._opened)
        if tag is None:
            self._part = "content"
            header = next((each for each in HEADERS if bare.startswith(each)), "")
            self._pending = bare.removeprefix(header) if header else self._pending
        else:
            self._part, self._closes = "reasoning", closes_of(tag)
            self._pending = "\n" * bool(self._thoughts) + bare.removeprefix(tag)
        return True

    def _of_content(self) -> str:
        if not self._calls:
            content, self._pending = self._pending, ""
            return content
        if not self._content and self._pending.lstrip().startswith("{"):
            # Llama writes a call as bare JSON, which is then the whole answer.
            self._part = "end"
            return ""
        content, called = self._until(MARKS)
        if called:
            self._part = "end"
        return content

    def _until(self, marks: Sequence[str]) -> tuple[str, str]:
        """Takes what is before the first of marks; also returns that mark, "" if none is there."""
        text = self._pending
        found = min(((text.index(mark), mark) for mark in marks if mark in text), default=None)
        if found is None:
            before = _without_start_of(text, marks)
            self._pending = text[len(before) :]
            return before, ""
        at, mark = found
        self._pending = text[at + len(mark) :]
        return text[:at], mark


def _without_start_of(text: str, marks: Sequence[str]) -> str:
    """Cuts the longest suffix of the text that may be the start of a mark."""
    longest = max((len(mark) for mark in marks), default=1) - 1
    for size in range(min(len(text), longest), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return text[:-size]
    return text

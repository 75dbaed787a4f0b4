"""What a conversation is made of, as digests: enough to name the message that was changed.

    earlier   [system "12:00"] [user "hi"] [assistant ANSWER]
    later     [system "12:01"] [user "hi"] [assistant ANSWER] [user "more"]
               messages[0].content

Each answer is stored with the outline of what is new since the answer that it continues, so a
conversation of many turns is stored once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

from areal.agents.chat import Answer, ChatRequest, digest
from areal.tokenizer.json_text import dumps, loads
from areal.workflows.rendering import Message

TOOLS, VARIABLES = "tools", "chat_template_kwargs"
_NEAR = 64
"""How many answers back an earlier conversation is looked for."""
_DIGITS = 12

Part = tuple[str, list[str], list[list[str]]]
"""A message: its role, digests of its content (an answer's, in each way in which clients send it
back), and digests of the name and the arguments of each call."""


@dataclass(frozen=True)
class Outline:
    """The messages that a request and its answer add to the conversation that they continue."""

    after: int | None
    """The answer that ends that conversation; None: it begins here."""
    about: list[str]
    """Digests of the tools and of the chat template's variables."""
    parts: list[Part]
    """The last one is the answer."""

    @classmethod
    def of(
        cls, request: ChatRequest, extends: int | None, new: Sequence[Message], answer: Answer
    ) -> Self:
        """Returns the outline of a request of which `new` are the messages since `extends`."""
        last = _part({**answer.message, "content": ""})
        texts = [_short(text.strip()) for text in answer.sent_back(request.begun)]
        return cls(
            extends,
            [_short(request.tools), _short(request.variables)],
            [*map(_part, new), (last[0], texts, last[2])],
        )

    @classmethod
    def read(cls, content: str) -> Self:
        """Reads what `write` has written."""
        return cls(**loads(content))

    def write(self) -> str:
        """Returns the outline as JSON."""
        return dumps(vars(self)).decode()


def differences(outlines: Sequence[str], numbers: Iterable[int]) -> list[str]:
    """Returns where the prompts of answers first differ from the nearest earlier conversation.

    Args:
        outlines: Of all answers of a session by number; "": not known.
        numbers: The answers, in order.

    Returns:
        For each a path such as `messages[2].tool_calls[0].function.arguments`, `tools`, or
        `chat_template_kwargs`; "" if there is nothing to compare, or no difference.
    """
    conversations = _Conversations(outlines)
    return [_difference(conversations, number) for number in numbers]


def _difference(conversations: _Conversations, number: int) -> str:
    mine = conversations.find(number)
    if mine is None:
        return ""
    prompt = mine.parts[:-1]
    most, found = -1, ""
    for theirs in conversations.before(number):
        same, path = _first(theirs.parts, prompt)
        for name, one, other in zip((TOOLS, VARIABLES), mine.about, theirs.about, strict=True):
            path = name if one != other else path
        if same > most and path:
            most, found = same, path
    return found


@dataclass(frozen=True)
class _Conversation:
    """A conversation, which ends with an answer."""

    about: list[str]
    parts: list[Part]
    """The parts of all messages, from the beginning."""


class _Conversations:
    """The conversations of a session. While the numbers rise, each outline is read once."""

    def __init__(self, outlines: Sequence[str]) -> None:
        self._outlines = outlines
        self._known: dict[int, _Conversation] = {}

    def before(self, number: int) -> Iterator[_Conversation]:
        """Yields the conversations that end in the answers shortly before one."""
        first = max(0, number - _NEAR)
        for gone in [each for each in self._known if each < first]:
            del self._known[gone]
        for earlier in range(first, number):
            if (found := self.find(earlier)) is not None:
                yield found

    def find(self, number: int) -> _Conversation | None:
        """Returns the conversation that an answer ends; None: it is not known."""
        if not self._outlines[number]:
            return None
        if number not in self._known:
            self._known[number] = self._read(number)
        return self._known[number]

    def _read(self, number: int) -> _Conversation:
        outline = last = Outline.read(self._outlines[number])
        pieces = [outline.parts]
        at = number
        # An answer continues an earlier one, whatever a damaged outline says.
        while outline.after is not None and outline.after < at and self._outlines[outline.after]:
            at = outline.after
            if at in self._known:
                pieces.append(self._known[at].parts)
                break
            outline = Outline.read(self._outlines[at])
            pieces.append(outline.parts)
        return _Conversation(last.about, [part for each in reversed(pieces) for part in each])


def _first(earlier: Sequence[Part], later: Sequence[Part]) -> tuple[int, str]:
    """Returns how many messages are equal, and the path of the first difference."""
    for at, (one, other) in enumerate(zip(earlier, later, strict=False)):
        if one != other and (path := _differs(one, other)):
            return at, f"messages[{at}].{path}"
    return min(len(earlier), len(later)), ""


def _differs(one: Part, other: Part) -> str:
    if one[0] != other[0]:
        return "role"
    if not set(one[1]) & set(other[1]):
        return "content"
    for at, (mine, theirs) in enumerate(zip(one[2], other[2], strict=False)):
        for name, a, b in zip(("name", "arguments"), mine, theirs, strict=True):
            if a != b:
                return f"tool_calls[{at}].function.{name}"
    return "tool_calls" if len(one[2]) != len(other[2]) else ""


def _part(message: Message) -> Part:
    functions = [call["function"] for call in message.get("tool_calls") or []]
    calls = [[_short(each["name"]), _short(each["arguments"])] for each in functions]
    return message["role"], [_short(message["content"].strip())], calls


def _short(value: Any) -> str:
    return digest(value)[:_DIGITS]

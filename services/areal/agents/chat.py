"""A chat request and its answers, whichever API they use."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from areal.agents.allowed import PART
from areal.agents.constraints import Required
from areal.errors import InvalidInput
from areal.request_fields import shown
from areal.tokenizer.json_text import WRITER_DEPTH, canonical, dumps, loads
from areal.types import LLMResponse, StopReason
from areal.workflows.answer_text import AnswerText
from areal.workflows.reasoning import split_reasoning
from areal.workflows.rendering import Message, Reply


@dataclass(frozen=True)
class ChatRequest:
    """An agent's request. The session sets the sampling parameters: training relies on them."""

    messages: list[Message]
    """Messages in the form that chat templates read: roles, texts, tool calls with their arguments
    as objects."""
    tools: list[Message] | None = None
    """JSON schemas in OpenAI's form; None: no tools are offered."""
    max_new_tokens: int | None = None
    """At most the session's own limit."""
    n: int = 1
    stop: tuple[str, ...] = ()
    """Texts that end an answer; they are not part of it."""
    may_call: bool = True
    """Whether calls are read from an answer; otherwise they remain text."""
    required: Required = field(default_factory=Required)
    parallel: bool = True
    """Whether an answer may have several calls; otherwise it ends with its first call."""
    extends: int | None = None
    """The answer that this request continues, if several end the same conversation."""
    keep: bool = False
    """Whether the conversation is kept, so that a later request can refer to the answer by its
    number."""
    begun: str = ""
    """How the answer begins: text that the agent has written and the model continues."""
    variables: dict[str, Any] = field(default_factory=dict)
    """More variables of the chat template."""
    lead: int = 0
    """Number of leading messages that are not part of the conversation that is kept."""


@dataclass(frozen=True)
class Call:
    """A function call that the model asks for, with its id."""

    id: str
    name: str
    arguments: str
    """A JSON object."""


@dataclass(frozen=True)
class Answer:
    """One answer, both as agents read it and as it was sampled."""

    number: int
    """Its number among the session's calls, in the order of arrival."""
    response: LLMResponse
    content: str
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    stopped_by: str = ""
    """The text of `ChatRequest.stop` that ended it; empty: none did."""
    streamed: tuple[str, str] = "", ""
    """The part of `reasoning` and of `content` that has been streamed."""

    @property
    def truncated(self) -> bool:
        """Whether the token limit ended it."""
        return self.response.stop_reason is StopReason.LENGTH

    @property
    def unsent(self) -> tuple[str, str]:
        """The part of `reasoning` and of `content` that has not been streamed."""
        whole = self.reasoning, self.content
        pairs = zip(whole, self.streamed, strict=True)
        reasoning, content = (w[len(t) :] if w.startswith(t) else "" for w, t in pairs)
        return reasoning, content

    def sent_back(self, begun: str) -> list[str]:
        """The contents with which clients send the answer back; `begun` is the text before it."""
        texts = dict.fromkeys([begun + self.content, self.content])
        if self.stopped_by:
            texts |= dict.fromkeys(text + self.stopped_by for text in list(texts))
        return list(texts)

    @property
    def message(self) -> Message:
        """The answer as the next request will contain it."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": loads(call.arguments)},
                }
                for call in self.calls
            ]
        return message


def read_answer(
    number: int,
    response: LLMResponse,
    reply: Reply,
    *,
    offered: bool,
    opened: bool,
    stopped_by: str = "",
    begun: bool = False,
) -> Answer:
    """Splits an answer into reasoning, text and calls.

    Args:
        number: The answer's number.
        response: What was sampled.
        reply: What the renderer parsed.
        offered: Whether the agent offered tools.
        opened: Whether the prompt opened the reasoning.
        stopped_by: The stop text that ended the answer, if one did.
        begun: Whether the answer continues a text of the agent, to which it is to be appended.
    """
    text = reply.text
    if stopped_by:
        text = text.partition(stopped_by)[0]
    reasoning, text, _ = split_reasoning(text, opened)
    calls: tuple[Call, ...] = ()
    if offered and not stopped_by:
        text = text if reply.content is None else reply.content
        known = [call.id for call in reply.tool_calls]
        ids = [
            own if own and known.count(own) == 1 else f"call_{uuid.uuid4().hex[:24]}"
            for own in known
        ]
        pairs = zip(ids, reply.tool_calls, strict=True)
        calls = tuple(Call(id_, c.name, json.dumps(c.arguments)) for id_, c in pairs)
    text = text.rstrip() if begun and not reasoning else text.strip()
    return Answer(number, response, text, reasoning.strip(), calls, stopped_by)


def cut_at_stop(
    response: LLMResponse, stop: Sequence[str], texts: AnswerText
) -> tuple[LLMResponse, str]:
    """The response up to the token that completes a stop text, and which text that is.

    The result is still a valid sample, because the decision to stop depends only on the tokens
    kept.
    """

    def found(ids: Sequence[int]) -> str:
        text = texts.of(ids)
        hits = [(text.index(each), each) for each in stop if each in text]
        return min(hits)[1] if hits else ""

    if not stop or not (hit := found(response.output_tokens)):
        return response, ""
    shorter = cut_where(response, lambda ids: bool(found(ids)))
    return shorter, found(shorter.output_tokens) or hit


def cut_where(response: LLMResponse, ends: Callable[[Sequence[int]], bool]) -> LLMResponse:
    """The response up to the first token with which `ends` is true of its ids, as of all ids.

    What has ended must not depend on later tokens; then the result is still a valid sample.
    """
    low, high = 1, len(response.output_tokens)
    while low < high:
        middle = (low + high) // 2
        if ends(response.output_tokens[:middle]):
            high = middle
        else:
            low = middle + 1
    return replace(
        response,
        output_tokens=response.output_tokens[:low],
        output_logprobs=response.output_logprobs[:low],
        output_versions=response.output_versions[:low],
        stop_reason=StopReason.STOP,
    )


@dataclass(frozen=True)
class History:
    """Digests of every prefix of a conversation; they tell whether a later request extends it."""

    start: str
    """Digest of the offered tools and of the chat template's variables."""
    turns: list[str]
    """`turns[i]` stands for the first i + 1 messages."""

    @classmethod
    def of(
        cls,
        messages: Sequence[Message],
        tools: list[Message] | None,
        variables: Mapping[str, Any] | None = None,
    ) -> History:
        """Returns the history of a request; `variables` are those of its chat template."""
        history = cls(digest([tools, variables] if variables else tools), [])
        for message in messages:
            history.turns.append(history.after(message))
        return history

    def ends(self, answer: Answer, begun: str) -> list[str]:
        """The digests of all its messages and an answer, for each way in which it is sent back.

        As it was sent; with the text before it that it continues; with the stop text that ended it,
        which some frameworks put back. That text is in the sampled ids.
        """
        return [self.after({**answer.message, "content": text}) for text in answer.sent_back(begun)]

    def after(self, message: Message) -> str:
        """The digest of all its messages and one more."""
        return digest([self.turns[-1] if self.turns else self.start, _gist(message)])


@dataclass(frozen=True)
class Kept:
    """The messages that a request and its answer add to the conversation that they continue."""

    after: int | None
    """The answer that ends that conversation; None: it begins here."""
    lead: int
    """See `ChatRequest.lead`."""
    messages: list[Message]

    @classmethod
    def read(cls, content: str) -> Self:
        """Reads what `write` has written."""
        return cls(**loads(content, WRITER_DEPTH))

    def write(self) -> str:
        """Returns the messages as JSON."""
        return dumps(vars(self)).decode()


def digest(value: Any) -> str:
    """Returns the digest of a JSON value, equal for all ways to write it."""
    return hashlib.blake2b(canonical(value), digest_size=16).hexdigest()


def _gist(message: Message) -> list[Any]:
    """Returns what clients send back unchanged: no ids, no reasoning, no outer blanks."""
    calls = [
        [call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls") or []
    ]
    return [message["role"], message["content"].strip(), calls]


def text_of(content: Any, where: str) -> str:
    """Returns the text of a message's content: a string, or text parts.

    Raises:
        InvalidInput: It has a part of another kind.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidInput(
            f"{where}: expected a string or a list of text parts, got {shown(content)}"
        )
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "input_text", "output_text") or not isinstance(
            part.get("text"), str
        ):
            raise InvalidInput(
                f"{where}[{index}]: a part of type {str(kind)[:80]!r}: expected text"
            )
        PART.check(part, f"{where}[{index}].")
        texts.append(part["text"])
    return "".join(texts)

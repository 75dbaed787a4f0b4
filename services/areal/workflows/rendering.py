"""Converts messages to token ids and back, in a model's chat format, for `Conversation`.

`TemplateRenderer` works with any chat template. What stands between an answer and the next one,
the bridge, is taken from a render in which a marker stands for the answer:

    ... <|im_start|>assistant
    MARKER<|im_end|>                 | the bridge: from here
    <|im_start|>user                 |
    Try again.<|im_end|>             |
    <|im_start|>assistant            | to here

No earlier turn is ever rendered again, so a template that rewrites earlier turns (Qwen3, GLM and
MiniMax drop their reasoning) cannot change what was sampled.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from areal.errors import InvalidInput
from areal.tokenizer import Tokenizer
from areal.workflows.answer_text import AnswerText
from areal.workflows.large_text import strings, texts_shown
from areal.workflows.reasoning import has_channels, opens_reasoning, split_reasoning
from areal.workflows.tool_text import ToolCall, read_calls, split_calls

Message = dict[str, Any]
"""{"role": "user", "content": "…"}, and other keys that the chat template reads
("tool_call_id")."""


@dataclass(frozen=True)
class Reply:
    """One sampled answer as a person or a tool reads it."""

    text: str
    """The whole text, which still contains the reasoning and the tool calls; without special
    tokens other than those that mark them."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Tool calls that are well formed, in the text after the reasoning."""
    content: str | None = None
    """The text without its reasoning and its calls; None: the renderer does not tell."""
    thinking: bool = False
    """Whether the reasoning has not ended."""

    @property
    def message(self) -> Message:
        """The answer as an assistant's message."""
        message: Message = {"role": "assistant", "content": self.text}
        if has_channels(self.text):  # gpt-oss's template refuses its own marks in a text
            message["content"] = self.content or ""
            message["reasoning_content"] = split_reasoning(self.text, False).reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                for c in self.tool_calls
            ]
        return message


class ChatRenderer(Protocol):
    """Converts between messages and ids in a model's chat format."""

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        begun: str = "",
    ) -> list[int]:
        """Returns the token ids of a conversation that has no sampled answer yet.

        Args:
            messages: The conversation.
            tools: What the model may call.
            add_generation_prompt: Whether the header of an answer follows.
            begun: How the answer begins; the model continues it.

        Raises:
            InvalidInput: The chat format has no place for these messages.
            PromptTooLong: They cannot fit the model's context.
        """
        ...

    def bridge(
        self,
        history: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        begun: str = "",
    ) -> list[int]:
        """Returns the ids between `history`, which ends with a sampled answer, and the next answer.

        Args:
            history: All ids so far. The answer may have ended by itself (its end-of-turn token is
                the last id) or been cut (the bridge then ends it).
            messages: The next messages; none has the role assistant.
            tools: As in `render`.
            begun: As in `render`.

        Raises:
            InvalidInput: They cannot be appended without changing what came before.
            PromptTooLong: They cannot fit the model's context.
        """
        ...

    def parse(
        self,
        ids: Sequence[int],
        tools: Sequence[Message] | None = None,
        prompt: Sequence[int] = (),
        opened: bool | None = None,
    ) -> Reply:
        """Reads the ids of one sampled answer.

        Args:
            ids: The answer.
            tools: What the model may call; None: not known.
            prompt: The ids before the answer.
            opened: Whether the answer begins within reasoning; None: the prompt's end tells.
        """
        ...

    def check_tools(self, messages: Sequence[Message], tools: Sequence[Message]) -> None:
        """Raises an error if the model could not call tools, or its calls could not be read.

        Args:
            messages: The conversation, which may tell of the tools if the chat format does not.
            tools: In OpenAI's form.

        Raises:
            InvalidInput: The chat format has no place for tools, or for calls that `parse` reads.
        """
        ...

    def with_variables(self, variables: Mapping[str, Any]) -> ChatRenderer:
        """Returns a renderer with more variables for the chat template."""
        ...


class TemplateRenderer:
    """A `ChatRenderer` on the model's own chat template.

    Example:
        >>> TemplateRenderer(engine.tokenizer, enable_thinking=False)
    """

    def __init__(self, tokenizer: Tokenizer, **variables: Any) -> None:
        """Stores the tokenizer; it renders nothing yet, so this is cheap.

        Args:
            tokenizer: The model's tokenizer.
            **variables: Variables of the template (`enable_thinking=False`).
        """
        self._tokenizer = tokenizer
        self._variables = variables
        self._close: str | None = None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        add_generation_prompt: bool = True,
        begun: str = "",
    ) -> list[int]:
        """See `ChatRenderer`."""
        self._refuse_longer(messages, begun)
        if begun:
            text = self._opened(messages, _marker(), tools) + begun
            return self._tokenizer.encode(text, add_special_tokens=False)
        return self._tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            **self._variables,
        )

    def bridge(
        self,
        history: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Message] | None = None,
        begun: str = "",
    ) -> list[int]:
        """See `ChatRenderer`. Costs two to four renders of the new messages alone."""
        self._refuse_longer(messages, begun)
        close, following = self._after_answer(messages, tools, begun)
        ids = self._tokenizer.encode(following, add_special_tokens=False)
        last = history[-1] if history else None
        if not ids or last is None or not self._tokenizer.is_special(ids[0]):
            return ids
        # An answer that was not cut has its end already. GLM's end is the next turn's first token,
        # and there another end (<|endoftext|>) cannot replace it.
        ended_otherwise = bool(close) and last in self._tokenizer.eos_token_ids
        return ids[1:] if ids[0] == last or ended_otherwise else ids

    def with_variables(self, variables: Mapping[str, Any]) -> TemplateRenderer:
        """Returns a renderer with more variables for the template, which replace its own."""
        return TemplateRenderer(self._tokenizer, **{**self._variables, **variables})

    def parse(
        self,
        ids: Sequence[int],
        tools: Sequence[Message] | None = None,
        prompt: Sequence[int] = (),
        opened: bool | None = None,
    ) -> Reply:
        """See `ChatRenderer`; `areal.workflows.tool_text.FORMS` has the forms of calls."""
        text = AnswerText(self._tokenizer).of(ids)
        if opened is None:
            opened = opens_reasoning(prompt, self._tokenizer)
        _, content, thinking = split_reasoning(text, opened)
        calls, rest = split_calls(content, tools, self._writes_bare_calls)
        return Reply(text, calls, rest, thinking)

    def check_tools(self, messages: Sequence[Message], tools: Sequence[Message]) -> None:
        """See `ChatRenderer`."""
        names = ", ".join(str(tool["function"]["name"]) for tool in tools)
        if not self._tokenizer.shows_tools and not any(
            tool["function"]["name"] in text
            for text in strings([messages, self._variables])
            for tool in tools
        ):
            raise InvalidInput(f"tools: the chat template has no place for them ({names})")
        written = self._tokenizer.call_shown
        if written and not read_calls(written) and not self._writes_bare_calls:
            raise InvalidInput(
                f"tools: calls in the form of the chat template are not read "
                f"({written[:120]!r}), so {names} could not be called"
            )

    @property
    def _writes_bare_calls(self) -> bool:
        """Whether the template writes a call as a JSON object that is the whole answer."""
        return self._tokenizer.call_shown.startswith('{"name": "probe"')

    def _refuse_longer(self, messages: Sequence[Message], begun: str) -> None:
        """Refuses messages that cannot fit before the template and the tokenizer work on them."""
        if (most := self._tokenizer.longest) is not None:
            self._tokenizer.refuse_longer([*texts_shown(messages), begun], most)

    def _after_answer(
        self, messages: Sequence[Message], tools: Sequence[Message] | None, begun: str
    ) -> tuple[str, str]:
        """Returns how the template ends an answer, and all text up to the next answer.

        A tool's result follows an answer with a call in it, where the template can show that.
        """
        marker = _marker()
        question: Message = {"role": "user", "content": "?"}
        answer: Message = {"role": "assistant", "content": marker}
        if self._close is None:
            self._close = self._tail([question, answer], marker, tools)
        close = self._close
        calls = [_call_of(m) for m in messages if m.get("role") == "tool"]
        if calls:
            try:
                calling = {**answer, "tool_calls": calls}
                before = self._tail([question, calling], marker, tools)
                after = self._following([question, calling], messages, marker, tools, begun)
                if after.startswith(before) and (before.endswith(close) or self._ends(before)):
                    return close, close + after.removeprefix(before)
            except InvalidInput:
                pass  # it has no place for an answer's text beside a call, or for several calls
        return close, self._following([question, answer], messages, marker, tools, begun)

    def _ends(self, text: str) -> bool:
        """Whether a text ends with a token that ends an answer: calls may have one of their own."""
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return bool(ids) and ids[-1] in self._tokenizer.eos_token_ids

    def _following(
        self,
        before: list[Message],
        messages: Sequence[Message],
        marker: str,
        tools: Sequence[Message] | None,
        begun: str = "",
    ) -> str:
        """The text after the marker, with every message in it."""
        if begun:
            mark = _marker()
            opened = self._opened([*before, *messages], mark, tools)
            text = opened.rpartition(marker)[2] + begun
        else:
            text = self._tail([*before, *messages], marker, tools, True)
        for index, message in enumerate(messages):
            content = message.get("content")
            if not isinstance(content, str) or content.strip() in text:
                continue
            # Escaped, or dropped? A plain word tells.
            probe = [*messages]
            probe[index] = {**message, "content": "ARRIVED"}
            if "ARRIVED" not in self._tail([*before, *probe], marker, tools, True):
                raise InvalidInput(
                    f"messages: the chat template leaves out a message of role "
                    f"{message.get('role')!r}"
                )
        return text

    def _opened(
        self, messages: Sequence[Message], marker: str, tools: Sequence[Message] | None
    ) -> str:
        """The text of a conversation and of the header of an answer that has begun already."""
        answer: Message = {"role": "assistant", "content": marker}
        text = self._tokenizer.render_chat(
            [*messages, answer], tools=tools, add_generation_prompt=False, **self._variables
        )
        before, found, _ = text.rpartition(marker)
        if not found:
            raise InvalidInput(
                "messages: the chat template leaves out the last message, which the model is to "
                "continue"
            )
        return before

    def _tail(
        self,
        messages: Sequence[Message],
        marker: str,
        tools: Sequence[Message] | None,
        add_generation_prompt: bool = False,
    ) -> str:
        text = self._tokenizer.render_chat(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **self._variables
        )
        _, found, tail = text.rpartition(marker)
        if not found:
            raise InvalidInput(
                "messages: the chat template leaves out the model's answer: turns cannot be "
                "appended to it"
            )
        return tail


def _marker() -> str:
    """A text that no message has."""
    return f"AREAL-ANSWER-{uuid.uuid4().hex}"


def _call_of(message: Message) -> Message:
    """The call that a tool's result answers."""
    function: Message = {"name": message.get("name") or "tool", "arguments": {}}
    return {"id": message.get("tool_call_id", ""), "type": "function", "function": function}

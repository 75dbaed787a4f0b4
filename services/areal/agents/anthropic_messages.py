"""Anthropic's messages: a request's JSON to a `ChatRequest`, answers to its JSON or events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from anthropic.types import (
    InputJSONDelta,
    Message,
    MessageDeltaUsage,
    RawContentBlockDeltaEvent,
    RawContentBlockStartEvent,
    RawContentBlockStopEvent,
    RawMessageDeltaEvent,
    RawMessageStartEvent,
    RawMessageStopEvent,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    Usage,
)
from anthropic.types.raw_message_delta_event import Delta
from pydantic import BaseModel

from areal.agents.allowed import BLOCKS, TURN
from areal.agents.chat import Answer, ChatRequest, text_of
from areal.agents.constraints import Required, forced_calls, schema_of
from areal.agents.fields import arguments_of, count, distinct, objects, template_of, texts
from areal.agents.partial import AnswerDelta
from areal.errors import InvalidInput
from areal.request_fields import get, need, shown
from areal.tokenizer.json_text import loads
from areal.workflows.rendering import Message as ChatMessage

Stop = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
Block = TextBlock | ThinkingBlock | ToolUseBlock
_CHOICES = {"auto": "auto", "none": "none", "any": "required", "tool": "function"}
"""The kinds of `tool_choice`, in OpenAI's words."""


def read_request(body: Mapping[str, Any]) -> ChatRequest:
    """Turns the JSON of a request into arguments that the session understands.

    Raises:
        InvalidInput: A field is malformed, or asks for something unsupported.
    """
    messages: list[ChatMessage] = []
    system = text_of(body.get("system"), "system")
    if system:
        messages.append({"role": "system", "content": system})
    turns = objects(need(body, "messages", list), "messages")
    if not turns:
        raise InvalidInput("messages: expected at least one")
    for index, turn in enumerate(turns):
        messages += _turn(turn, f"messages[{index}]")
    choice = get(body, "tool_choice", dict) or {}
    kind = choice.get("type", "auto")
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidInput(f"tool_choice.type {shown(kind)}: expected one of {', '.join(_CHOICES)}")
    name = need(choice, "name", str, "tool_choice.") if kind == "tool" else None
    output = get(body, "output_config", dict) or {}
    asked = get(output, "format", dict, "output_config.") or get(body, "output_format", dict)
    schema = schema_of(asked, "output_config.format")
    begun = _begun(messages, len(turns) - 1)
    tools = _tools(body)
    return ChatRequest(
        messages if begun is None else messages[:-1],
        tools,
        count(body, "max_tokens"),
        stop=texts(body, "stop_sequences"),
        may_call=kind != "none",
        required=Required(schema, forced_calls(_CHOICES[kind], name, tools)),
        parallel=get(choice, "disable_parallel_tool_use", bool, "tool_choice.") is not True,
        begun=begun or "",
        variables=template_of(body),
    )


def _begun(messages: Sequence[ChatMessage], last: int) -> str | None:
    """The text of a last turn of the assistant's, which the model continues; None: none is."""
    if messages[-1]["role"] != "assistant":
        return None
    if len(messages) < 2:
        raise InvalidInput("messages: expected a message of the user's before the assistant's")
    if messages[-1].get("tool_calls"):
        raise InvalidInput(f"messages[{last}]: a call without its result, expected a tool_result")
    if messages[-1].get("reasoning_content"):
        raise InvalidInput(f"messages[{last}]: expected no thinking in a turn that continues")
    content: str = messages[-1]["content"]
    return content


def _tools(body: Mapping[str, Any]) -> list[ChatMessage] | None:
    """Returns the tools in OpenAI's form, which chat templates read."""
    tools = get(body, "tools", list)
    if not tools:
        return None
    read: list[ChatMessage] = []
    for index, tool in enumerate(objects(tools, "tools")):
        where = f"tools[{index}]."
        if tool.get("type", "custom") != "custom":
            raise InvalidInput(f"{where}type {shown(tool['type'])}: expected 'custom'")
        function = {
            "name": need(tool, "name", str, where),
            "description": get(tool, "description", str, where) or "",
            "parameters": need(tool, "input_schema", dict, where),
        }
        read.append({"type": "function", "function": function})
    distinct([tool["function"]["name"] for tool in read], "tools[{}].name")
    return read


def _turn(turn: ChatMessage, where: str) -> Iterator[ChatMessage]:
    """Yields one turn's messages: results of tools first, one message each, then the text."""
    role = turn.get("role")
    if role not in ("user", "assistant", "system"):  # Claude Code: reminders between the turns
        raise InvalidInput(f"{where}.role {shown(role)}: expected 'user', 'assistant' or 'system'")
    TURN.check(turn, f"{where}.")
    content = turn.get("content")
    if not isinstance(content, list):
        yield {"role": role, "content": text_of(content, f"{where}.content")}
        return
    words, calls, results, thoughts = [], [], [], []
    for index, block in enumerate(objects(content, f"{where}.content")):
        at = f"{where}.content[{index}]"
        kind = block.get("type")
        if isinstance(kind, str) and kind in BLOCKS:
            BLOCKS[kind].check(block, f"{at}.")
        if kind == "tool_use" and role == "assistant":
            calls.append(_call(block, f"{at}."))
        elif kind == "tool_result" and role == "user":
            results.append(_result(block, at))
        elif kind == "thinking" and role == "assistant":
            thoughts.append(need(block, "thinking", str, f"{at}."))
        elif kind != "redacted_thinking":
            if kind != "text":
                raise InvalidInput(f"{at}: a part of type {shown(kind)}: expected text")
            words.append(need(block, "text", str, f"{at}."))
    yield from results
    if words or calls or not results:
        more = {"reasoning_content": "".join(thoughts), "tool_calls": calls}
        said = {name: value for name, value in more.items() if value}
        yield {"role": role, "content": "".join(words), **said}


def _call(block: ChatMessage, where: str) -> ChatMessage:
    function = {
        "name": need(block, "name", str, where),
        "arguments": arguments_of(block.get("input")),
    }
    return {"id": need(block, "id", str, where), "type": "function", "function": function}


def _result(block: ChatMessage, where: str) -> ChatMessage:
    result = text_of(block.get("content"), f"{where}.content")
    if get(block, "is_error", bool, f"{where}.") and result[:5].casefold() != "error":
        result = f"error: {result}"  # no chat template has a place for the flag
    known = need(block, "tool_use_id", str, f"{where}.")
    return {"role": "tool", "tool_call_id": known, "content": result}


# ---------------------------------------------------------------- answers


def _stop_reason(answer: Answer) -> Stop:
    if answer.calls:
        return "tool_use"
    if answer.stopped_by:
        return "stop_sequence"
    return "max_tokens" if answer.truncated else "end_turn"


def _blocks(answer: Answer) -> list[Block]:
    blocks: list[Block] = []
    if answer.reasoning:
        blocks.append(ThinkingBlock(type="thinking", thinking=answer.reasoning, signature=""))
    if answer.content or not answer.calls:
        blocks.append(TextBlock(type="text", text=answer.content))
    for call in answer.calls:
        blocks.append(
            ToolUseBlock(type="tool_use", id=call.id, name=call.name, input=loads(call.arguments))
        )
    return blocks


def write_message(answer_id: str, model: str, answers: Sequence[Answer]) -> dict[str, Any]:
    """Writes the answer to a request that does not stream."""
    [answer] = answers
    return _message(answer_id, model, answer).model_dump(mode="json", exclude_unset=True)


def _message(answer_id: str, model: str, answer: Answer) -> Message:
    return Message(
        id=answer_id,
        type="message",
        role="assistant",
        model=model,
        content=list(_blocks(answer)),
        stop_reason=_stop_reason(answer),
        stop_sequence=answer.stopped_by or None,
        usage=Usage(
            input_tokens=len(answer.response.input_tokens),
            output_tokens=len(answer.response.output_tokens),
        ),
    )


class Events:
    """Writes an answer as the events of a stream."""

    def __init__(self, answer_id: str, model: str) -> None:
        """Content blocks are written one after another."""
        self._id, self._model = answer_id, model
        self._blocks = 0
        self._open = ""
        self._started = False

    def begin(self, delta: AnswerDelta | None = None) -> Iterator[dict[str, Any]]:
        """The first event; without a delta nothing: `end` writes the whole answer."""
        if delta is not None:
            yield self._start(delta.prompt_tokens)

    def more(self, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        """Yields the events for new text of the unfinished answer."""
        if delta.reasoning:
            yield from self._text_delta("thinking", delta.reasoning)
        if delta.content:
            yield from self._text_delta("text", delta.content)

    def end(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        """Yields the events for everything that `more` has not written."""
        [answer] = answers
        if not self._started:
            yield self._start(len(answer.response.input_tokens))
        reasoning, content = answer.unsent
        if reasoning:
            yield from self._text_delta("thinking", reasoning)
        if content or not (answer.content or answer.calls):
            yield from self._text_delta("text", content)
        yield from self._stop()
        for call in answer.calls:
            empty = ToolUseBlock(type="tool_use", id=call.id, name=call.name, input={})
            yield self._begin(empty)
            yield self._delta(InputJSONDelta(type="input_json_delta", partial_json=call.arguments))
            yield from self._stop()
        end = Delta(stop_reason=_stop_reason(answer), stop_sequence=answer.stopped_by or None)
        usage = MessageDeltaUsage(output_tokens=len(answer.response.output_tokens))
        yield _made(RawMessageDeltaEvent(type="message_delta", delta=end, usage=usage))
        yield _made(RawMessageStopEvent(type="message_stop"))

    def _start(self, prompt_tokens: int) -> dict[str, Any]:
        self._started = True
        message = Message(
            id=self._id,
            type="message",
            role="assistant",
            model=self._model,
            content=[],
            stop_reason=None,
            stop_sequence=None,
            usage=Usage(input_tokens=prompt_tokens, output_tokens=0),
        )
        return _made(RawMessageStartEvent(type="message_start", message=message))

    def _text_delta(self, kind: Literal["thinking", "text"], text: str) -> Iterator[dict[str, Any]]:
        if self._open != kind:
            yield from self._stop()
            if kind == "text":
                yield self._begin(TextBlock(type="text", text=""))
            else:
                yield self._begin(ThinkingBlock(type="thinking", thinking="", signature=""))
        if kind == "text":
            yield self._delta(TextDelta(type="text_delta", text=text))
        else:
            yield self._delta(ThinkingDelta(type="thinking_delta", thinking=text))

    def _begin(self, block: Block) -> dict[str, Any]:
        self._open = block.type
        at = self._blocks
        return _made(
            RawContentBlockStartEvent(type="content_block_start", index=at, content_block=block)
        )

    def _delta(self, delta: TextDelta | ThinkingDelta | InputJSONDelta) -> dict[str, Any]:
        at = self._blocks
        return _made(RawContentBlockDeltaEvent(type="content_block_delta", index=at, delta=delta))

    def _stop(self) -> Iterator[dict[str, Any]]:
        if self._open:
            at = self._blocks
            yield _made(RawContentBlockStopEvent(type="content_block_stop", index=at))
            self._open = ""
            self._blocks += 1


def _made(event: BaseModel) -> dict[str, Any]:
    return event.model_dump(mode="json", exclude_unset=True)

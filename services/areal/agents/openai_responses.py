"""OpenAI's responses: a request's JSON to a `ChatRequest`, answers to its JSON or events.

    message, message, function_call, function_call  ──> one message of the assistant, with two calls
    function_call_output                            ──> one message of a tool
    reasoning                                       ──> reasoning of the assistant's next message

What a response says is its conversation, kept with the session's calls; `previous_response_id`
names it.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from openai.types.responses import (
    FunctionTool,
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseOutputText,
    ResponseReasoningItem,
    ResponseUsage,
)
from openai.types.responses.response import IncompleteDetails
from openai.types.responses.response_output_text import Logprob
from openai.types.responses.response_reasoning_item import Content
from openai.types.responses.response_usage import InputTokensDetails, OutputTokensDetails
from pydantic import ValidationError

from areal.agents.allowed import ITEMS
from areal.agents.chat import Answer, ChatRequest, text_of
from areal.agents.constraints import Required, forced_calls, schema_of
from areal.agents.fields import arguments_of, count, distinct, number_of, objects, template_of
from areal.errors import InvalidInput, NotFound
from areal.request_fields import get, need, shown
from areal.tokenizer import Tokenizer
from areal.tokenizer.token_bytes import token_bytes
from areal.workflows.rendering import Message

KIND = "resp"
"""How the ids of responses begin."""
_ROLES = {"system", "developer", "user", "assistant"}
_LOGPROBS = "message.output_text.logprobs"
Item = ResponseReasoningItem | ResponseOutputMessage | ResponseFunctionToolCall


def previous_of(body: Mapping[str, Any], session_id: str) -> int | None:
    """The number of the answer that the request continues.

    Raises:
        NotFound: The id is not one of this session's.
    """
    known = get(body, "previous_response_id", str)
    if known is None:
        return None
    number = number_of(known, session_id) if known.startswith(f"{KIND}-") else None
    if number is None:
        raise NotFound(
            f"previous_response_id {known[:80]!r}: no response of this session has this id"
        )
    return number


def read_request(
    body: Mapping[str, Any],
    extends: int | None = None,
    before: Sequence[Message] = (),
) -> ChatRequest:
    """Turns the JSON of a request into arguments that the session understands.

    Args:
        body: The request.
        extends: The answer that `previous_response_id` names.
        before: The conversation that it ends.

    Raises:
        InvalidInput: A field is malformed, or asks for something unsupported.
    """
    words = get(body, "text", dict) or {}
    schema = schema_of(get(words, "format", dict, "text."), "text.format")
    tools = _tools(body)
    choice, name = body.get("tool_choice"), None
    if isinstance(choice, dict):
        kind = need(choice, "type", str, "tool_choice.")
        name = need(choice, "name", str, "tool_choice.") if kind == "function" else None
        choice = kind
    instructions = get(body, "instructions", str)
    lead: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
    asked = _messages(body)
    return ChatRequest(
        [*lead, *before, *asked],
        tools,
        count(body, "max_output_tokens"),
        may_call=choice != "none",
        required=Required(schema, forced_calls(choice, name, tools)),
        parallel=get(body, "parallel_tool_calls", bool) is not False,
        extends=extends,
        keep=get(body, "store", bool) is not False,
        variables=template_of(body),
        lead=len(lead),
    )


def _tools(body: Mapping[str, Any]) -> list[Message] | None:
    """Returns the tools in the form of chat completions, which chat templates read."""
    tools = get(body, "tools", list)
    if not tools:
        return None
    read: list[Message] = []
    for index, tool in enumerate(objects(tools, "tools")):
        where = f"tools[{index}]."
        if tool.get("type") != "function":
            raise InvalidInput(f"{where}type {shown(tool.get('type'))}: expected 'function'")
        function: Message = {"name": need(tool, "name", str, where)}
        if (description := get(tool, "description", str, where)) is not None:
            function["description"] = description
        function["parameters"] = get(tool, "parameters", dict, where) or {}
        read.append({"type": "function", "function": function})
    distinct([tool["function"]["name"] for tool in read], "tools[{}].name")
    return read


async def resolved(
    body: dict[str, Any],
    session_id: str,
    answer_of: Callable[[int], Awaitable[Message | None]],
) -> dict[str, Any]:
    """The request with the items of earlier answers in place of their ids.

    Args:
        body: The request; an item of `input` may be an `item_reference`.
        session_id: The session's id, which the ids of its items contain.
        answer_of: Returns an answer as a message, or None if it was not stored.

    Raises:
        NotFound: An id is none of this session's, or its answer was not stored.
    """
    items = body.get("input")
    if not isinstance(items, list):
        return body
    expanded: list[Any] = []
    for index, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") == "item_reference":
            known = need(item, "id", str, f"input[{index}].")
            kind, number, place = _reference(known, session_id)
            answer = None if number is None else await answer_of(number)
            stored = None if answer is None else _item(kind, answer, place)
            if stored is None:
                raise NotFound(
                    f"input[{index}].id {known[:80]!r}: no stored item of this session has this id"
                )
            expanded.append(stored)
        else:
            expanded.append(item)
    return {**body, "input": expanded}


def _reference(known: str, session_id: str) -> tuple[str, int | None, int]:
    """The kind of an item, the number of its answer, and which of its calls the item is."""
    kind, _, rest = known.partition("-")
    named = rest.removeprefix(f"{KIND}-{session_id}-")
    numbers = named.split("-")
    right = named != rest and len(numbers) == (2 if kind == "fc" else 1)
    if not right or not all(n.isdecimal() and n.isascii() and len(n) < 10 for n in numbers):
        return kind, None, 0
    return kind, int(numbers[0]), int(numbers[-1])


def _item(kind: str, answer: Message, place: int) -> Message | None:
    """Returns one item of an answer; None: the answer has no such item."""
    calls = answer.get("tool_calls") or []
    if kind == "msg":
        return {"type": "message", "role": "assistant", "content": answer["content"]}
    if kind == "rs":
        thought = answer.get("reasoning_content", "")
        return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": thought}]}
    if kind == "fc" and place < len(calls):
        call = calls[place]
        return {"type": "function_call", "call_id": call["id"], **call["function"]}
    return None


def _messages(body: Mapping[str, Any]) -> list[Message]:
    """The items of `input`."""
    asked = body.get("input")
    if isinstance(asked, str):
        return [{"role": "user", "content": asked}]
    items = objects(need(body, "input", list), "input")
    if not items:
        raise InvalidInput("input: expected at least one item")
    messages: list[Message] = []
    calling: Message | None = None  # the assistant's message that further calls belong to
    thought = ""  # belongs to the assistant's message that follows
    for index, item in enumerate(items):
        where = f"input[{index}]"
        kind = item.get("type") or "message"
        if isinstance(kind, str) and kind in ITEMS:
            ITEMS[kind].check(item, f"{where}.")
        if kind == "reasoning":
            thought += _reasoning(item, where)
            continue
        if kind == "function_call":
            if calling is None:
                calling = {"role": "assistant", "content": ""}
                messages.append(calling)
            thought = _think(calling, thought)
            calling.setdefault("tool_calls", []).append(_call(item, where))
            continue
        calling = None
        if kind == "message":
            messages.append(_message(item, where))
            if messages[-1]["role"] == "assistant":
                calling = messages[-1]
                thought = _think(calling, thought)
        elif kind == "function_call_output":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": need(item, "call_id", str, f"{where}."),
                    "content": text_of(item.get("output"), f"{where}.output"),
                }
            )
            thought = ""
        else:
            raise InvalidInput(
                f"{where}.type {shown(kind)}: expected 'message', 'function_call', "
                "'function_call_output' or 'reasoning'"
            )
    if not messages:
        raise InvalidInput("input: expected an item other than reasoning")
    return messages


def _reasoning(item: Message, where: str) -> str:
    """The text of a reasoning item: its content, or the summary of it."""
    for name in ("content", "summary"):
        parts = objects(get(item, name, list, f"{where}.") or [], f"{where}.{name}")
        if parts:
            at = f"{where}.{name}[{{}}]."
            return "".join(need(p, "text", str, at.format(i)) for i, p in enumerate(parts))
    return ""


def _think(message: Message, thought: str) -> str:
    """Gives reasoning to a message; returns what is left of it."""
    if thought:
        message["reasoning_content"] = message.get("reasoning_content", "") + thought
    return ""


def _message(item: Message, where: str) -> Message:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidInput(
            f"{where}.role {shown(role)}: expected one of {', '.join(sorted(_ROLES))}"
        )
    content = text_of(item.get("content"), f"{where}.content")
    return {"role": "system" if role == "developer" else role, "content": content}


def _call(item: Message, where: str) -> Message:
    function = {
        "name": need(item, "name", str, f"{where}."),
        "arguments": arguments_of(item.get("arguments")),
    }
    known = need(item, "call_id", str, f"{where}.")
    return {"id": known, "type": "function", "function": function}


# ---------------------------------------------------------------- answers


class Writer:
    """One response; `areal.agents.responses_stream` writes it as events."""

    def __init__(
        self, answer_id: str, model: str, body: Mapping[str, Any], tokenizer: Tokenizer
    ) -> None:
        """`body`: the request, parts of which a response repeats."""
        self._id, self._model, self._body, self._tokenizer = answer_id, model, body, tokenizer
        self._created = time.time()

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Writes the answer to a request that does not stream."""
        return as_json(self.response(answer))

    def whole_of_none(self) -> dict[str, Any]:
        """Writes the response as a stream begins it."""
        return as_json(self.response(None))

    def _items(self, answer: Answer) -> list[Item]:
        items: list[Item] = []
        if answer.reasoning:
            items.append(reasoning_item(self._id, answer.reasoning))
        if answer.content or not answer.calls:
            item = message_item(self._id, answer.content, answer.truncated)
            [words] = item.content
            if isinstance(words, ResponseOutputText) and wants_logprobs(self._body):
                words.logprobs = self._logprobs(answer)
            items.append(item)
        for index, call in enumerate(answer.calls):
            items.append(
                ResponseFunctionToolCall(
                    type="function_call",
                    id=f"fc-{self._id}-{index}",
                    call_id=call.id,
                    name=call.name,
                    arguments=call.arguments,
                    status="completed",
                )
            )
        return items

    def _logprobs(self, answer: Answer) -> list[Logprob]:
        response = answer.response
        ids, contents = response.output_tokens, token_bytes(self._tokenizer, response.output_tokens)
        return [
            Logprob(
                token=self._tokenizer.decode([token]),
                bytes=list(content),
                logprob=logprob,
                top_logprobs=[],
            )
            for token, content, logprob in zip(ids, contents, response.output_logprobs, strict=True)
        ]

    def response(self, answer: Answer | None) -> Response:
        """Returns the response; with `answer` None, the one with which a stream begins."""
        body = self._body
        made = Response(
            id=self._id,
            object="response",
            created_at=self._created,
            model=self._model,
            status="in_progress",
            output=[],
            error=None,
            incomplete_details=None,
            instructions=get(body, "instructions", str),
            metadata=get(body, "metadata", dict),
            parallel_tool_calls=get(body, "parallel_tool_calls", bool) is not False,
            previous_response_id=get(body, "previous_response_id", str),
            tool_choice=body.get("tool_choice") or "auto",
            tools=[
                FunctionTool(
                    type="function",
                    name=tool["name"],
                    description=tool.get("description"),
                    parameters=tool.get("parameters"),
                    strict=tool.get("strict"),
                )
                for tool in get(body, "tools", list) or []
            ],
            max_output_tokens=get(body, "max_output_tokens", int),
        )
        if answer is None:
            return made
        made.output = list(self._items(answer))
        made.status = "incomplete" if answer.truncated else "completed"
        if answer.truncated:
            made.incomplete_details = IncompleteDetails(reason="max_output_tokens")
        prompt = len(answer.response.input_tokens)
        sampled = len(answer.response.output_tokens)
        made.usage = ResponseUsage(
            input_tokens=prompt,
            input_tokens_details=InputTokensDetails(cached_tokens=0, cache_write_tokens=0),
            output_tokens=sampled,
            output_tokens_details=OutputTokensDetails(reasoning_tokens=0),
            total_tokens=prompt + sampled,
        )
        return made


def check_repeated(body: Mapping[str, Any], tokenizer: Tokenizer) -> None:
    """Checks the parts of a request that its response repeats, before anything is sampled.

    Raises:
        InvalidInput: A field is malformed.
    """
    wants_logprobs(body)
    try:
        Writer("", "", body, tokenizer).whole_of_none()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise InvalidInput(f"{where} {shown(first['input'])}: {first['msg']}") from None


def wants_logprobs(body: Mapping[str, Any]) -> bool:
    """Whether the request asks for the logprobs of its tokens."""
    return _LOGPROBS in (get(body, "include", list) or [])


def reasoning_item(answer_id: str, text: str) -> ResponseReasoningItem:
    """An output item with reasoning."""
    content = [Content(type="reasoning_text", text=text)]
    return ResponseReasoningItem(
        type="reasoning", id=f"rs-{answer_id}", summary=[], content=content
    )


def message_item(answer_id: str, text: str, truncated: bool = False) -> ResponseOutputMessage:
    """An output item with text."""
    return ResponseOutputMessage(
        type="message",
        id=f"msg-{answer_id}",
        role="assistant",
        status="incomplete" if truncated else "completed",
        content=[ResponseOutputText(type="output_text", text=text, annotations=[])],
    )


def as_json(made: Any) -> dict[str, Any]:
    """The JSON to send."""
    content: dict[str, Any] = made.model_dump(mode="json", by_alias=True, exclude_unset=True)
    return content

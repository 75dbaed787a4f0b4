"""OpenAI's chat completions: a request's JSON to a `ChatRequest`, answers to its JSON or events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice, ChoiceLogprobs
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.chat.chat_completion_chunk import (
    ChoiceDelta,
    ChoiceDeltaToolCall,
    ChoiceDeltaToolCallFunction,
)
from openai.types.chat.chat_completion_chunk import ChoiceLogprobs as ChunkLogprobs
from openai.types.chat.chat_completion_message_function_tool_call import (
    ChatCompletionMessageFunctionToolCall,
    Function,
)
from openai.types.chat.chat_completion_token_logprob import ChatCompletionTokenLogprob
from openai.types.completion_usage import CompletionUsage

from areal.agents.allowed import CALL, FUNCTION, MESSAGE
from areal.agents.chat import Answer, ChatRequest, text_of
from areal.agents.constraints import Required, forced_calls, schema_of
from areal.agents.fields import (
    arguments_of,
    count,
    distinct,
    objects,
    template_of,
    texts,
    usage_wanted,
)
from areal.agents.partial import AnswerDelta
from areal.errors import InvalidInput
from areal.request_fields import get, need, shown
from areal.tokenizer import Tokenizer
from areal.tokenizer.chat_template import REASONING
from areal.tokenizer.token_bytes import token_bytes
from areal.workflows.rendering import Message

MAX_N = 128
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_ROLE_OF = {
    "tool_call_id": "tool",
    **dict.fromkeys(("tool_calls", "prefix", "partial", *REASONING), "assistant"),
}
"""Fields of a message that only one role has."""
Finish = Literal["stop", "length", "tool_calls"]


def read_request(body: Mapping[str, Any]) -> ChatRequest:
    """Turns the JSON of a request into arguments that the session understands.

    Raises:
        InvalidInput: A field is malformed, or asks for something unsupported.
    """
    usage_wanted(body)
    for flag in ("logprobs", "return_token_ids"):
        get(body, flag, bool)
    messages = need(body, "messages", list)
    if not messages:
        raise InvalidInput("messages: expected at least one")
    read = [
        _message(message, f"messages[{i}]")
        for i, message in enumerate(objects(messages, "messages"))
    ]
    begun = _begun(messages, body)
    tools = _tools(body)
    choice = body.get("tool_choice")
    name: str | None = None
    if isinstance(choice, dict):
        kind = need(choice, "type", str, "tool_choice.")
        if kind == "function":
            function = need(choice, "function", dict, "tool_choice.")
            name = need(function, "name", str, "tool_choice.function.")
        choice = kind
    schema = schema_of(get(body, "response_format", dict), "response_format")
    return ChatRequest(
        read if begun is None else read[:-1],
        tools,
        count(body, "max_completion_tokens") or count(body, "max_tokens"),
        count(body, "n", MAX_N) or 1,
        texts(body, "stop"),
        may_call=choice != "none",
        required=Required(schema, forced_calls(choice, name, tools)),
        parallel=get(body, "parallel_tool_calls", bool) is not False,
        begun=begun or "",
        variables=template_of(body),
    )


def _begun(messages: Sequence[Message], body: Mapping[str, Any]) -> str | None:
    """The text of a last message that the model is to continue; None: there is none.

    The request says so with `continue_final_message`, as in vLLM and SGLang, or the message with
    `prefix` or `partial`, as in DeepSeek's, Mistral's and Moonshot's APIs.
    """
    last, where = messages[-1], f"messages[{len(messages) - 1}]"
    marked = [key for key in ("prefix", "partial") if get(last, key, bool, f"{where}.")]
    if not get(body, "continue_final_message", bool) and not marked:
        if get(body, "add_generation_prompt", bool) is False:
            raise InvalidInput(
                "add_generation_prompt False: expected continue_final_message with it"
            )
        return None
    if last.get("role") != "assistant" or last.get("tool_calls") or len(messages) < 2:
        raise InvalidInput(f"{where}: expected a text of the assistant after other messages")
    if thought := next((key for key in REASONING if last.get(key)), None):
        raise InvalidInput(f"{where}.{thought}: not supported in a message that continues")
    return text_of(last.get("content"), f"{where}.content")


def _tools(body: Mapping[str, Any]) -> list[Message] | None:
    """The functions that the prompt shows; raises InvalidInput."""
    tools = get(body, "tools", list)
    if not tools:
        return None
    for index, tool in enumerate(objects(tools, "tools")):
        where = f"tools[{index}]."
        if tool.get("type") != "function":
            raise InvalidInput(f"{where}type {shown(tool.get('type'))}: expected 'function'")
        function = need(tool, "function", dict, where)
        need(function, "name", str, f"{where}function.")
        get(function, "parameters", dict, f"{where}function.")
    distinct([tool["function"]["name"] for tool in tools], "tools[{}].function.name")
    return list(tools)


def _message(message: Message, where: str) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidInput(
            f"{where}.role {shown(role)}: expected one of {', '.join(sorted(_ROLES))}"
        )
    read: Message = {
        "role": "system" if role == "developer" else role,
        "content": text_of(message.get("content"), f"{where}.content"),
    }
    MESSAGE.check(message, f"{where}.")
    for key, whose in _ROLE_OF.items():
        if message.get(key) and role != whose:
            raise InvalidInput(f"{where}.{key}: a field of the role {whose!r}, got {role!r}")
    for key in ("name", "tool_call_id"):
        if (value := get(message, key, str, f"{where}.")) is not None:
            read[key] = value
    thoughts = [get(message, key, str, f"{where}.") for key in REASONING]
    if thought := next(filter(None, thoughts), None):
        read["reasoning_content"] = thought
    if calls := get(message, "tool_calls", list, f"{where}."):
        read["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{i}].")
            for i, call in enumerate(objects(calls, f"{where}.tool_calls"))
        ]
    return read


def _call(call: Message, where: str) -> Message:
    CALL.check(call, where)
    function = need(call, "function", dict, where)
    FUNCTION.check(function, f"{where}function.")
    name = need(function, "name", str, f"{where}function.")
    return {
        "id": get(call, "id", str, where) or "",
        "type": "function",
        "function": {"name": name, "arguments": arguments_of(function.get("arguments"))},
    }


# ---------------------------------------------------------------- answers


def finish_reason(answer: Answer) -> Finish:
    """Returns why the answer ended, in OpenAI's terms."""
    if answer.calls:
        return "tool_calls"
    return "length" if answer.truncated else "stop"


def usage_of(answers: Sequence[Answer]) -> CompletionUsage:
    """Counts the tokens of a request and all its answers."""
    prompt = len(answers[0].response.input_tokens)
    sampled = sum(len(answer.response.output_tokens) for answer in answers)
    return CompletionUsage(
        prompt_tokens=prompt, completion_tokens=sampled, total_tokens=prompt + sampled
    )


def _logprobs(answer: Answer, tokenizer: Tokenizer) -> list[ChatCompletionTokenLogprob]:
    response = answer.response
    ids, contents = response.output_tokens, token_bytes(tokenizer, response.output_tokens)
    return [
        ChatCompletionTokenLogprob(
            token=tokenizer.decode([token]), bytes=list(content), logprob=p, top_logprobs=[]
        )
        for token, content, p in zip(ids, contents, response.output_logprobs, strict=True)
    ]


def write_completion(
    answer_id: str,
    model: str,
    answers: Sequence[Answer],
    body: Mapping[str, Any],
    tokenizer: Tokenizer,
) -> dict[str, Any]:
    """Writes the answer to a request that does not stream.

    With `return_token_ids` in the request, as vLLM has it, each choice has `token_ids`, and the
    whole `prompt_token_ids`.
    """
    choices = []
    for index, answer in enumerate(answers):
        message = ChatCompletionMessage(role="assistant", content=answer.content or None)
        if answer.calls:
            message.tool_calls = [
                ChatCompletionMessageFunctionToolCall(
                    id=call.id,
                    type="function",
                    function=Function(name=call.name, arguments=call.arguments),
                )
                for call in answer.calls
            ]
        choice = Choice(index=index, message=message, finish_reason=finish_reason(answer))
        if body.get("logprobs"):
            choice.logprobs = ChoiceLogprobs(content=_logprobs(answer, tokenizer))
        choices.append(choice)
    whole = ChatCompletion(
        id=answer_id,
        object="chat.completion",
        created=int(time.time()),
        model=model,
        choices=choices,
        usage=usage_of(answers),
    ).model_dump(mode="json", exclude_unset=True)
    for choice, answer in zip(whole["choices"], answers, strict=True):
        choice["id"] = id_of(answer_id, choice["index"])
        choice["message"].setdefault("content", None)
        if answer.reasoning:
            choice["message"]["reasoning_content"] = answer.reasoning
        if body.get("return_token_ids"):
            choice["token_ids"] = answer.response.output_tokens
            whole["prompt_token_ids"] = answer.response.input_tokens
    return whole


def id_of(answer_id: str, index: int) -> str:
    """The id of one of a request's answers, for rewards; `answer_id` is that of the first."""
    begins, _, first = answer_id.rpartition("-")
    return f"{begins}-{int(first) + index}"


class Events:
    """Writes answers as the chunks of a stream."""

    def __init__(
        self, answer_id: str, model: str, body: Mapping[str, Any], tokenizer: Tokenizer
    ) -> None:
        """`body` is the request."""
        self._id, self._model, self._body, self._tokenizer = answer_id, model, body, tokenizer
        self._created = int(time.time())
        self._begun: set[int] = set()

    def begin(self, delta: AnswerDelta | None = None) -> Iterator[dict[str, Any]]:
        """Returns nothing: the first chunk of each choice contains its role."""
        return iter(())

    def more(self, delta: AnswerDelta) -> Iterator[dict[str, Any]]:
        """Yields the chunks for new text of an unfinished answer."""
        yield self._text_delta(delta.index, delta.reasoning, delta.content)

    def end(self, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
        """Yields the chunks for everything that `more` has not written."""
        for index, answer in enumerate(answers):
            reasoning, content = answer.unsent
            if reasoning or content or index not in self._begun:
                logprobs = None
                if self._body.get("logprobs"):
                    logprobs = ChunkLogprobs(content=_logprobs(answer, self._tokenizer))
                yield self._text_delta(index, reasoning, content, logprobs)
            for number, call in enumerate(answer.calls):
                function = ChoiceDeltaToolCallFunction(name=call.name, arguments=call.arguments)
                made = ChoiceDeltaToolCall(
                    index=number, id=call.id, type="function", function=function
                )
                delta = ChoiceDelta(tool_calls=[made])
                yield self._chunk([ChunkChoice(index=index, delta=delta, finish_reason=None)])
            reason = finish_reason(answer)
            last = ChunkChoice(index=index, delta=ChoiceDelta(), finish_reason=reason)
            yield self._chunk([last])
        if usage_wanted(self._body):
            yield self._chunk([], usage_of(answers))

    def _text_delta(
        self, index: int, reasoning: str, content: str, logprobs: ChunkLogprobs | None = None
    ) -> dict[str, Any]:
        delta = ChoiceDelta(content=content)
        if index not in self._begun:
            delta.role = "assistant"
            self._begun.add(index)
        choice = ChunkChoice(index=index, delta=delta, finish_reason=None)
        if logprobs is not None:
            choice.logprobs = logprobs
        chunk = self._chunk([choice])
        if reasoning:
            chunk["choices"][0]["delta"]["reasoning_content"] = reasoning
        return chunk

    def _chunk(
        self, choices: list[ChunkChoice], usage: CompletionUsage | None = None
    ) -> dict[str, Any]:
        made = ChatCompletionChunk(
            id=self._id,
            object="chat.completion.chunk",
            created=self._created,
            model=self._model,
            choices=choices,
        )
        if usage is not None:
            made.usage = usage
        chunk = made.model_dump(mode="json", exclude_unset=True)
        for choice in chunk["choices"]:
            choice["id"] = id_of(self._id, choice["index"])
        return chunk

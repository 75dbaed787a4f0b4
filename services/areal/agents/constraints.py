"""What an agent requires of an answer, as a grammar for the engine: forced calls, JSON schemas.

    tool_choice: required, a function ─┐
    response_format, text.format       ├─> Required ─> structural tag ─> `LLMRequest.grammar`
    output_config.format               ┘

A call is written as the model's chat template writes one, so that it is parsed and continued like a
call that the model made by itself. The model may reason first, where its template lets it.
Structural tags are xgrammar's: https://xgrammar.mlc.ai/docs/ (SGLang's default backend).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal.errors import InvalidInput
from areal.request_fields import get, need, shown
from areal.tokenizer import Tokenizer
from areal.tokenizer.json_text import dumps
from areal.workflows.rendering import ChatRenderer, Message

Format = dict[str, Any]
_PROBE = "areal_probe"
_JSON_CALL = re.compile(
    r'((?:<tool_call>\s*)?)\{"name": "areal_probe", "(arguments|parameters)": '
    r'\{"q": 1\}\}((?:\s*</tool_call>)?)'
)
_GLM_CALL = re.compile(r"<tool_call>areal_probe\s*<arg_key>")


@dataclass(frozen=True)
class Required:
    """What an answer must be; without `schema` and `calls`: anything."""

    schema: Mapping[str, Any] | None = None
    """JSON schema of the text."""
    calls: tuple[str, ...] = ()
    """Functions of which it must call one or more."""

    def grammar(
        self,
        tools: Sequence[Message],
        *,
        parallel: bool,
        opened: bool,
        prompt: Sequence[int],
        renderer: ChatRenderer,
        tokenizer: Tokenizer,
    ) -> str:
        """Returns the grammar; empty if every answer will do.

        Args:
            tools: All functions on offer.
            parallel: Whether an answer may have several calls.
            opened: Whether the prompt opened the reasoning.
            prompt: The prompt's ids.
            renderer: Shows how the model writes a call.
            tokenizer: The model's.

        Raises:
            InvalidInput: A call is required, and the chat template has no known form of calls.
        """
        if self.schema is None and not self.calls:
            return ""
        if self.calls:
            offered = [tool for tool in tools if tool["function"]["name"] in self.calls]
            answer = _calls(offered, parallel, renderer, tokenizer)
        else:
            answer = _schema(self.schema)
            if tools:  # they may still be called
                answer = _any_of(_calls(tools, parallel, renderer, tokenizer), answer)
        whole = [*_reasoning(opened, prompt, tokenizer), answer]
        form = whole[0] if len(whole) == 1 else {"type": "sequence", "elements": whole}
        return dumps({"type": "structural_tag", "format": form}).decode()


def schema_of(value: Mapping[str, Any] | None, where: str) -> Mapping[str, Any] | None:
    """The JSON schema that a format asks for: text, json_object or json_schema.

    Args:
        value: `{"type": …, "schema": …}`; chat completions put the schema into "json_schema".
        where: The name of the field.

    Raises:
        InvalidInput: Another type, or no schema.
    """
    kind = (value or {}).get("type", "text")
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise InvalidInput(
            f"{where}.type {shown(kind)}: expected 'text', 'json_object' or 'json_schema'"
        )
    inner = get(value, "json_schema", dict, f"{where}.")
    if inner is None:
        return need(value, "schema", dict, f"{where}.")
    return need(inner, "schema", dict, f"{where}.json_schema.")


def forced_calls(choice: Any, name: Any, tools: Sequence[Message] | None) -> tuple[str, ...]:
    """The functions of which one must be called.

    Args:
        choice: "auto" (or None), "none", "required", or "function" for the one named.
        name: That name.
        tools: The functions on offer.

    Raises:
        InvalidInput: Another choice, or a function that is not offered.
    """
    if choice is None or choice in ("auto", "none"):
        return ()
    if choice not in ("required", "function"):
        raise InvalidInput(
            f"tool_choice {shown(choice)}: expected 'auto', 'none', 'required' or a function"
        )
    offered = tuple(tool["function"]["name"] for tool in tools or ())
    if choice == "required":
        if not offered:
            raise InvalidInput("tool_choice 'required': expected tools, got none")
        return offered
    if name not in offered:
        raise InvalidInput(
            f"tool_choice: the function {shown(name)} is not among the tools "
            f"({', '.join(offered) or 'none'})"
        )
    return (name,)


# ---------------------------------------------------------------- structural tags


def _schema(schema: Mapping[str, Any] | None) -> Format:
    return {"type": "json_schema", "json_schema": schema}


def _any_of(*forms: Format) -> Format:
    return {"type": "or", "elements": list(forms)}


def _calls(
    tools: Sequence[Message], parallel: bool, renderer: ChatRenderer, tokenizer: Tokenizer
) -> Format:
    """Returns a grammar of one call or more, in the form in which the chat template writes them."""
    ids = renderer.render(
        [
            {"role": "user", "content": "?"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {
                        "id": "call_0",
                        "type": "function",
                        "function": {"name": _PROBE, "arguments": {"q": 1}},
                    }
                ],
            },
        ],
        None,
        add_generation_prompt=False,
    )
    text = tokenizer.decode(ids)
    if found := _JSON_CALL.search(text):
        opening, key, closing = found.groups()
        tags = [
            _tag(f'{opening}{{"name": {_quoted(tool)}, "{key}": ', tool, "}" + closing)
            for tool in tools
        ]
        several = parallel and bool(opening)
    elif _GLM_CALL.search(text):
        tags = [
            _tag(f"<tool_call>{tool['function']['name']}\n", tool, "</tool_call>", style="glm_xml")
            for tool in tools
        ]
        several = parallel
    else:
        raise InvalidInput(
            "tools: the chat template writes tool calls in no known form, so they can neither be "
            "forced nor combined with a schema"
        )
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": "\n",
        "at_least_one": True,
        "stop_after_first": not several,
    }


def _quoted(tool: Message) -> str:
    return dumps(tool["function"]["name"]).decode()


def _tag(begin: str, tool: Message, end: str, **more: str) -> Format:
    arguments = tool["function"].get("parameters") or {"type": "object"}
    return {"type": "tag", "begin": begin, "content": {**_schema(arguments), **more}, "end": end}


def _reasoning(opened: bool, prompt: Sequence[int], tokenizer: Tokenizer) -> list[Format]:
    """Returns a grammar of what may precede: the rest of an opened thought, or a whole one."""
    thinks = tokenizer.backend.token_to_id("<think>") is not None
    if not opened and (
        not thinks or tokenizer.decode(list(prompt[-8:])).rstrip().endswith("</think>")
    ):
        return []
    thought = {
        "type": "tag",
        "begin": "" if opened else "<think>",
        "content": {"type": "any_text"},
        "end": "</think>",
    }
    space = {"type": "regex", "pattern": "\\s*"}
    if opened:
        return [thought, space]
    whole = {"type": "sequence", "elements": [thought, space]}
    return [{"type": "optional", "content": whole}]

"""Renders, bridges and calls are those of the package `renderers`, written by others."""

from __future__ import annotations

import json

import pytest
from renderers import create_renderer
from renderers.configs import GLM45RendererConfig, Llama3RendererConfig, Qwen3RendererConfig
from tests.unit.areal.workflows.chat_families import end_of_turn, tokenizer

from areal.workflows.rendering import TemplateRenderer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]
CONFIGS = {
    "qwen3": Qwen3RendererConfig(thinking_retention="all"),
    "llama-3.1": Llama3RendererConfig(),
    "glm-4.6": GLM45RendererConfig(thinking_retention="all"),
}
ASK = {"role": "user", "content": "What is 12 and 34?"}
AGAIN = {"role": "user", "content": "Try again, 数学."}


class Adapter:
    """Our tokenizer as that package wants one."""

    name_or_path, unk_token_id = "", None

    def __init__(self, family):
        self._tokenizer = tokenizer(family)
        self.eos_token_id = self._tokenizer.eos_token_id

    def encode(self, text, add_special_tokens=True, **_):
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids, skip_special_tokens=False, **_):
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens):
        if isinstance(tokens, str):
            return self._tokenizer.backend.token_to_id(tokens)
        return [self._tokenizer.backend.token_to_id(token) for token in tokens]


def both(family):
    return TemplateRenderer(tokenizer(family)), create_renderer(Adapter(family), CONFIGS[family])


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_opening_when_rendered_then_the_same_ids(family, system, tools):
    ours, theirs = both(family)
    messages = [{"role": "system", "content": "Be brief."}] * system + [ASK]
    expected = theirs.render_ids(messages, tools=tools, add_generation_prompt=True)
    assert ours.render(messages, tools, add_generation_prompt=True) == expected


@pytest.mark.parametrize(
    ("family", "ended"),
    # A cut answer of GLM gets an <|endoftext|> there, which its template never writes in between.
    [
        ("qwen3", True),
        ("qwen3", False),
        ("llama-3.1", True),
        ("llama-3.1", False),
        ("glm-4.6", True),
    ],
)
def test_bridge_when_an_answer_was_cut_or_ended_then_the_same_ids(family, ended):
    ours, theirs = both(family)
    prompt = ours.render([ASK], add_generation_prompt=True)
    text = "\n<think></think>\n46, été" if family == "glm-4.6" else "46, été"
    answer = [*tokenizer(family).encode(text, add_special_tokens=False), 300, 17]
    answer += [end_of_turn(family)] * ended
    expected = theirs.bridge_to_next_turn(prompt, answer, [AGAIN])
    history = prompt + answer
    assert expected is not None
    assert history + ours.bridge(history, [AGAIN]) == list(expected.token_ids)


CALLS = {
    "qwen3": "<think>\nhm\n</think>\n\n<tool_call>\n"
    '{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    "llama-3.1": '{"name": "add", "parameters": {"a": 1}}',
    "glm-4.6": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n",
}


@pytest.mark.parametrize("family", CONFIGS)
def test_call_when_parsed_then_the_same_name_and_arguments(family):
    ours, theirs = both(family)
    ids = tokenizer(family).encode(CALLS[family], add_special_tokens=False)
    ids.append(end_of_turn(family))
    expected = theirs.parse_response(ids, tools=TOOLS)
    found = [(call.name, call.arguments) for call in ours.parse(ids).tool_calls]
    read = [
        (c.name, json.loads(c.arguments) if isinstance(c.arguments, str) else c.arguments)
        for c in expected.tool_calls
    ]
    assert found == read == [("add", {"a": 1})]

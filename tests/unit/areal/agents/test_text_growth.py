"""What reads a model's text takes work in proportion to its length, whatever the model repeats.

Work is counted in lines of our own code and, where a library does it, in what the library is given;
a clock would be the machine's. The counts of two lengths are compared.
"""

# ruff: noqa: RUF001 - the names of DeepSeek's tokens

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from tests.unit.areal.workflows.chat_families import tokenizer

from areal.agents.chat import read_answer
from areal.agents.partial import PartialAnswer
from areal.tokenizer import Tokenizer
from areal.tokenizer.json_text import canonical, loads
from areal.types import LLMResponse, StopReason
from areal.workflows import tool_arguments, tool_text
from areal.workflows.reasoning import split_reasoning
from areal.workflows.rendering import Reply, TemplateRenderer
from areal.workflows.tool_text import MARKS, read_calls, split_calls

UNITS = [
    "<tool_call>",
    "<tool_call>{",
    '<tool_call>{"',
    '<tool_call>{"a":',
    '<tool_call>{"a":"',
    '<tool_call>{"a":"\\"',
    '<tool_call>{",":"x",',
    "<tool_call>[",
    "<tool_call>{[",
    "<tool_call>{}",
    "<tool_call>{} ",
    '<tool_call>{"name": "f", "arguments": {}}',
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "<tool_call>a<arg_key>",
    "<tool_call>a<arg_key>k</arg_key>",
    "<tool_call>a<arg_key>k</arg_key><arg_value>",
    "<tool_call>a<arg_key>k</arg_key><arg_value>v</arg_value>",
    "<tool_call>a ",
    "<tool_call> ",
    "</tool_call>",
    *MARKS[1:],
    "<function=f>",
    "<function=f><parameter=k>",
    "<function=f><parameter=k>v</parameter>",
    "<function=f><parameter=k>v</parameter></function>",
    "</parameter> ",
    '<minimax:tool_call><invoke name="f">',
    '<minimax:tool_call><invoke name="f"><parameter name="k">',
    "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
    '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>',
    "<|tool_call_begin|>functions.f:0",
    "<|tool_call_begin|>f<|tool_call_argument_begin|>{",
    "[TOOL_CALLS]f{",
    "[TOOL_CALLS]f{}",
    "[TOOL_CALLS][{",
    '[TOOL_CALLS][{"name": "f", "arguments": {}},',
    "<|tool_call>call:f{",
    '<|tool_call>call:f{a:<|"|>',
    '<|"|>',
    "<|tool_call>call:f{a:1}<tool_call|>",
    "<|tool_call_start|>[f(",
    "<|tool_call_start|>[f(a='",
    "<|tool_call_start|>[f(a=1),",
    "f(a=1)\n",
    "<think>",
    "</think>",
    '{"name": "f", "parameters": {"a": ',
    "{",
    "\\",
    '"',
    " ",
    "\n",
    "é",
]
ENDS = [
    "",
    "</tool_call>",
    "</arg_key>",
    "</arg_value></tool_call>",
    "}</tool_call>",
    '"',
    "</think>",
]


class Steps:
    """Counts the lines of areal's code that run, and the characters that patterns read."""

    def __init__(self) -> None:
        self.count = 0

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        if "/areal/" not in frame.f_code.co_filename:
            return None
        self.count += event == "line"
        return self._trace

    def of(self, work: Callable[[], Any]) -> int:
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            work()
        finally:
            sys.settrace(before)
        return self.count


class CountedText(str):
    """A text that counts how many characters are looked at by its methods."""

    looked = 0

    def find(self, what: str, start: int = 0, end: int = sys.maxsize) -> int:
        found = super().find(what, start, end)
        CountedText.looked += (len(self) if found < 0 else found) - start
        return found

    def index(self, what: str, start: int = 0, end: int = sys.maxsize) -> int:
        found = super().index(what, start, end)
        CountedText.looked += found - start
        return found

    def __getitem__(self, key: Any) -> str:
        part = super().__getitem__(key)
        CountedText.looked += len(part)
        return part


class CountedPattern:
    """A compiled pattern that counts the characters of its matches and the gaps between them."""

    def __init__(self, pattern: Any) -> None:
        self._pattern = pattern

    def match(self, text: str, at: int) -> Any:
        found = self._pattern.match(text, at)
        CountedText.looked += 1 if found is None else 1 + found.end() - at
        return found

    def search(self, text: str, at: int) -> Any:
        found = self._pattern.search(text, at)
        CountedText.looked += (len(text) if found is None else found.end()) - at
        return found

    def finditer(self, text: str, at: int) -> Any:
        for found in self._pattern.finditer(text, at):
            CountedText.looked += 1 + found.end() - at
            at = found.end()
            yield found


def counted(value: Any) -> Any:
    """The same with patterns that count, wherever they are in it."""
    if isinstance(value, re.Pattern):
        return CountedPattern(value)
    if isinstance(value, tuple):
        return tuple(map(counted, value))
    if is_dataclass(value):
        names = (each.name for each in fields(value))
        return replace(value, **{name: counted(getattr(value, name)) for name in names})
    return value


@pytest.fixture
def looked(monkeypatch):
    """Returns how many characters `read_calls` looks at."""
    for module in (tool_text, tool_arguments):
        for name, value in [*vars(module).items()]:
            if name != "_ESCAPE" and (isinstance(value, re.Pattern) or name == "FORMS"):
                monkeypatch.setattr(module, name, counted(value))

    def count(text: str) -> int:
        CountedText.looked = 0
        read_calls(CountedText(text))
        return CountedText.looked

    return count


@pytest.mark.parametrize("unit", UNITS)
def test_calls_when_anything_is_repeated_then_each_character_is_read_a_few_times(unit, looked):
    for end in ENDS:
        text = unit * (20_000 // len(unit)) + end
        assert looked(text) <= 10 * len(text) + 100, end
        assert len(split_calls(text)[1]) <= len(text)


@pytest.mark.parametrize("unit", UNITS)
def test_answer_when_anything_is_repeated_then_the_steps_grow_with_its_length(unit):
    response = LLMResponse([], [1], [0.0], [0], StopReason.STOP)

    def steps(count: int) -> int:
        text = unit * count
        counted = Steps()

        def work() -> None:
            split_reasoning(text, opened=True)
            reply = Reply(text, *split_calls(text))
            read_answer(0, response, reply, offered=True, opened=False)

        return counted.of(work)

    assert steps(800) <= 2.5 * steps(400) + 500


class Decoding(Tokenizer):
    """Counts the ids that it decodes."""

    decoded = 0

    def decode(self, ids, *, skip_special_tokens=False):
        self.decoded += len(ids)
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


class Streaming:
    """Streams ids one by one, and counts what it costs."""

    def __init__(self, ids: list[int], **options: Any) -> None:
        plain = tokenizer("qwen2.5")
        self.tokenizer = Decoding(plain.backend)
        self.partial = PartialAnswer(self.tokenizer, **options)
        self.told = ["", ""]
        for end in range(1, len(ids) + 1):
            for place, text in enumerate(self.partial.update(ids[:end])):
                self.told[place] += text


def ids_of(text: str) -> list[int]:
    return tokenizer("qwen2.5").encode(text, add_special_tokens=False)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("opened", [False, True])
def test_stream_when_anything_is_repeated_then_little_is_held_and_decoded(unit, opened):
    ids = ids_of(unit * (1500 // len(unit)))
    streaming = Streaming(ids, calls=True, opened=opened, stop=["xyz"])
    assert streaming.tokenizer.decoded <= 8 * len(ids) + 200
    partial: Any = streaming.partial
    if partial._part != "end":  # a call, of which nothing is read any more
        assert len(partial._pending) < 100
        assert len(partial._held) < 100


@pytest.mark.parametrize("content", [b"\x80", b"\xff", b"\xe4", b"\xe4\xbd", b"\xa0\xe4\xbd"])
def test_stream_when_bytes_are_no_characters_then_each_is_decoded_a_few_times(content):
    model = tokenizer("qwen2.5")
    table, alphabet = model.backend.get_vocab(), byte_alphabet()
    ids = [table[alphabet[byte]] for byte in content * 600]
    streaming = Streaming(ids, calls=True)
    # One at a time, each is decoded with those that still wait.
    assert streaming.tokenizer.decoded <= 200 * len(ids)
    assert len(streaming.partial._text._new) <= 64


def byte_alphabet() -> dict[int, str]:
    """How byte-level tokenizers write each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {
        byte: chr(256 + index) for index, byte in enumerate(others)
    }


def test_special_tokens_when_repeated_then_they_are_not_decoded_again():
    model = tokenizer("qwen2.5")
    special = next(i for i in range(model.vocab_size) if model.is_special(i))
    streaming = Streaming([*ids_of("a"), *[special] * 2000, *ids_of("b")])
    assert streaming.told[1] == "ab"
    assert streaming.tokenizer.decoded < 20_000


@pytest.mark.parametrize("unit", ["-X", "AREAL-ANSWER", "AREAL-ANSWER-X"])
def test_bridge_when_a_message_looks_like_its_mark_then_the_template_is_rendered_as_often(unit):
    rendered = []

    class Rendering(Tokenizer):
        def render_chat(self, messages, **more):
            rendered.append(1)
            return super().render_chat(messages, **more)

    plain = tokenizer("qwen2.5")
    model = Rendering(
        plain.backend,
        chat_template=plain.chat_template,
        special_tokens=plain.special_tokens,
        eos_token_ids=plain.eos_token_ids,
    )
    text = "AREAL-ANSWER" + unit * 2000

    def work() -> list[int]:
        renderer = TemplateRenderer(model)
        return renderer.bridge([1], [{"role": "user", "content": text}])

    steps = Steps().of(work)
    assert text in plain.decode(work())
    assert steps < 3000
    assert len(rendered) <= 8


@pytest.mark.parametrize(
    "unit", ['{"a":1},', "[[]],", "123456789012345678 ,", '"\\\\",', f"{3**60},", "1.5e3,"]
)
def test_json_when_long_then_the_steps_grow_with_its_length(unit):
    def steps(count: int) -> int:
        text = "[" + (unit * count)[:-1] + "]"
        return Steps().of(lambda: canonical(loads(text)))

    assert steps(2000) <= 2.5 * steps(1000) + 500

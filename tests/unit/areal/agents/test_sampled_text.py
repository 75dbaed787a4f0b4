"""Whatever a model writes reaches the agent as valid JSON, is recorded, and is extended."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.areal.agents.raw_calls import (
    APIS,
    answer_of,
    asking,
    continuing,
    events_of,
    send,
    session_of,
    strict,
)
from tests.unit.areal.agents.scripted_model import Scripted, check_exact
from tests.unit.areal.workflows.chat_families import tokenizer

BIG = 123456789012345678901234567890


def call(arguments: str, name: str = '"f"') -> str:
    return f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'


CALLS = {
    "a big integer": (f'{{"a": {BIG}}}', {"a": BIG}),
    "a negative one": (f'{{"a": [-{BIG}]}}', {"a": [-BIG]}),
    "400 digits": ('{"a": ' + "7" * 400 + "}", {"a": int("7" * 400)}),
    "150 levels": ('{"a": ' + "[" * 148 + "1" + "]" * 148 + "}", None),
    "150 levels and a big integer": ('{"a": ' + "[" * 148 + f"{BIG}" + "]" * 148 + "}", None),
    "half an integer": ('{"a": 12345678901234567890.5}', {"a": 12345678901234567890.5}),
    "nul": ('{"a": "\\u0000"}', {"a": "\0"}),
    "a pair": ('{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
    "a closing tag": ('{"a": "</tool_call>"}', {"a": "</tool_call>"}),
    "line separators": ('{"a": "\u2028\u0085"}', {"a": "\u2028\u0085"}),
    "a key twice": ('{"a": 1, "a": 2}', {"a": 2}),
}
TEXTS = {
    "nan": call('{"a": NaN}'),
    "infinity": call('{"a": -Infinity}'),
    "1e999": call('{"a": 1e999}'),
    "1e999 beside a big integer": call(f'{{"a": 1e999, "b": {BIG}}}'),
    "5000 digits": call('{"a": ' + "7" * 5000 + "}"),
    "half a pair": call('{"a": "\\ud800"}'),
    "half a pair beside a big integer": call(f'{{"a": "\\ud800", "b": {BIG}}}'),
    "half a pair as a name": call("{}", '"\\udfff"'),
    "151 levels": call('{"a": ' + "[" * 149 + "1" + "]" * 149 + "}"),
    "3000 brackets": call('{"a": ' + "[" * 3000 + "1" + "]" * 3000 + "}"),
    "3000 open brackets": "<tool_call>" + "[" * 3000,
    "3000 braces": "<tool_call>" + '{"a":' * 3000,
    "unclosed": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}',
    "cut in a string": '<tool_call>\n{"name": "f", "argum',
    "only a tag": "<tool_call>",
    "tags": "<tool_call>" * 500 + "</tool_call>" * 500,
    "bare and deep": '{"name": "f", "parameters": ' + '{"a":' * 3000 + "1" + "}" * 3001,
    "bare nan": '{"name": "f", "parameters": {"a": NaN}}',
    "glm without an end": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1",
    "nul": "a\0b",
}


async def both_turns(path: str, *answers: Any) -> tuple[str, list[Any]]:
    """Asks twice, the second time with all that came back; returns text and calls of the first."""
    scripted = Scripted(*answers, "done")
    session = session_of(scripted)
    first = asking(path)
    status, content = await send(session, path, first)
    assert status == 200, content
    text, calls, kept = answer_of(path, content)
    status, content = await send(session, path, continuing(path, first, kept, calls))
    assert status == 200, content
    check_exact(session.calls, scripted, chains=[[0, 1]])
    return text, calls


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("name", CALLS)
async def test_call_when_its_json_is_unusual_then_the_agent_reads_and_extends_it(path, name):
    source, expected = CALLS[name]
    text, calls = await both_turns(path, call(source))
    [(_, called, arguments)] = calls
    assert (text, called) == ("", "f")
    assert arguments == (json.loads(source) if expected is None else expected)


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("name", TEXTS)
async def test_answer_when_it_is_no_call_then_it_is_text_and_extended(path, name):
    text, calls = await both_turns(path, TEXTS[name])
    assert calls == []
    assert text == TEXTS[name].strip()


@pytest.mark.parametrize("name", [*CALLS, *TEXTS])
async def test_answer_when_its_id_is_all_that_comes_back_then_the_kept_one_is_extended(name):
    said = TEXTS[name] if name in TEXTS else call(CALLS[name][0])
    scripted = Scripted(said, "done")
    session, first = session_of(scripted), asking("/responses")
    _, content = await send(session, "/responses", first)
    more = {"input": "go on", "previous_response_id": strict(content)["id"]}
    status, content = await send(session, "/responses", {**first, **more})
    assert status == 200, content
    check_exact(session.calls, scripted, chains=[[0, 1]])


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("name", [*CALLS, *TEXTS])
async def test_stream_when_the_model_writes_anything_then_every_event_is_json(path, name):
    said = TEXTS[name] if name in TEXTS else call(CALLS[name][0])
    scripted = Scripted(said)

    async def step(index: int, end: int) -> None:
        return None

    scripted.step = step
    status, content = await send(session_of(scripted), path, asking(path, stream=True))
    assert status == 200
    events = events_of(content)
    assert events
    assert all("error" not in event and event.get("type") != "error" for event in events)
    if path == "/chat/completions" and name in TEXTS:
        assert (
            "".join(e["choices"][0]["delta"].get("content") or "" for e in events) == said.strip()
        )


async def test_calls_when_one_is_malformed_then_it_stays_text_and_the_other_is_read():
    bad, good = call('{"a": NaN}'), call("{}")
    text, calls = await both_turns("/chat/completions", f"A {bad} B {good} C")
    assert text == f"A {bad} B  C"
    assert [each[1:] for each in calls] == [("f", {})]


@pytest.mark.parametrize(
    ("written", "sent_back"),
    [("3.0", "3"), ("1e2", "100"), ("-0.0", "0"), ("1E-7", "1e-7"), ("2.50", "2.5"),
     (str(BIG), "1.2345678901234568e+29"), ("9007199254740993", "9007199254740992")],
)  # fmt: skip
async def test_number_when_javascript_writes_it_again_then_the_conversation_is_one(
    written, sent_back
):
    scripted = Scripted(call(f'{{"a": {written}, "b": [1]}}'), "done")
    session, first = session_of(scripted), asking("/chat/completions")
    _, content = await send(session, "/chat/completions", first)
    _, calls, [message] = answer_of("/chat/completions", content)
    message["tool_calls"][0]["function"]["arguments"] = f'{{"b":[1],"a":{sent_back}}}'
    again = continuing("/chat/completions", first, [message], calls)
    status, _ = await send(session, "/chat/completions", again)
    assert status == 200
    check_exact(session.calls, scripted, chains=[[0, 1]])


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<tool_call>\n{", '{"name": "f", "arguments": {', "}", "}}",
     '"', "\\", '"a": 1', "NaN", "[" * 300, "]" * 300, "9" * 40, "1e999", "\\ud800", "\0", "é😀",
     "<think>", "</think>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "f\n", " ",
     "\n", "-0.0", '{"name": "f", "parameters": {}}', "�"]
)  # fmt: skip
FAMILIES = ["qwen2.5", "qwen3", "llama-3.1", "glm-4.6"]


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
async def test_answer_when_random_then_read_by_every_api_and_extended(family, data):
    path = data.draw(st.sampled_from(APIS))
    if data.draw(st.booleans()):
        answer: Any = "".join(data.draw(st.lists(PIECES, max_size=12)))
    else:
        model = tokenizer(family)
        chance = random.Random(data.draw(st.integers(0, 2**32)))
        answer = [chance.randrange(model.vocab_size) for _ in range(chance.randint(1, 60))]
    scripted = Scripted(answer, "done", family=family)
    session, first = session_of(scripted), asking(path)
    status, content = await send(session, path, first)
    assert status == 200, content
    _, calls, kept = answer_of(path, content)
    status, content = await send(session, path, continuing(path, first, kept, calls))
    assert status == 200, content
    merged = session.calls.merged(1.0)
    assert sorted(number for chain in merged.chains for number in chain) == [0, 1]


def test_strict_when_nan_then_it_fails() -> None:
    with pytest.raises(AssertionError):
        strict("[NaN]")

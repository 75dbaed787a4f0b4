"""Agents get the calls of every family, also where tokens that mark them are special."""

# ruff: noqa: RUF001 - the names of DeepSeek's tokens

from __future__ import annotations

import pytest
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
from tests.unit.areal.datasets.test_chats_families import FAMILIES
from tests.unit.areal.workflows import chat_families

# Families whose templates are long are stood in for by what they have in common.
PLAIN = """\
{%- if tools %}<s>system {{ tools | tojson }}</s>{% endif -%}
{%- for m in messages %}<s>{{ m.role }} {{ m.content or "" }}</s>{% endfor -%}
{%- if add_generation_prompt %}<s>assistant {% endif -%}"""
UNREAD = PLAIN.replace(
    "</s>{% endfor", "{% if m.tool_calls %}CALL {{ m.tool_calls | tojson }}{% endif %}</s>{% endfor"
)
CALLS = {
    "mistral-nemo": '[TOOL_CALLS][{"name": "f", "arguments": {"a": %d}, "id": "abcdefgh%d"}]',
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:%d"
    '<|tool_call_argument_begin|>{"a": %d}<|tool_call_end|><|tool_calls_section_end|>',
    "minimax-m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">%d</parameter>\n'
    "</invoke>\n</minimax:tool_call>",
    "gemma-4": "<|tool_call>call:f{a:%d}<tool_call|>",
    "lfm2": "<|tool_call_start|>[f(a=%d)]<|tool_call_end|>",
    "qwen3.5": "<tool_call>\n<function=f>\n<parameter=a>\n%d\n</parameter>\n</function>\n"
    "</tool_call>",
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
    '{"a": %d}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
}
SPECIAL = ["</s>", "<s>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call_start|>",
           "<|tool_call_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"]  # fmt: skip


def call(family: str, number: int) -> str:
    form = CALLS[family]
    return form % ((number,) * form.count("%d"))


class FamilyModel(Scripted):
    """Answers in the tokens of a family."""

    def __init__(self, family: str, *answers: str) -> None:
        super().__init__()
        if known := FAMILIES.get(family):
            source, end = chat_families.template(family), known.special[0]
            self.tokenizer = chat_families.build(source, known.special, known.added, known.ends)
        else:
            end, source = "</s>", UNREAD if family == "unread" else PLAIN
            self.tokenizer = chat_families.build(source, SPECIAL, [], [end])
        thought = "</think>" * (family == "minimax-m2")  # its template opens one
        self.answers = [
            self.tokenizer.encode(thought + each + end, add_special_tokens=False)
            for each in answers
        ]


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("family", CALLS)
async def test_call_when_in_the_familys_form_then_the_agent_reads_and_extends_it(family, path):
    said = call(family, 1) if family == "mistral-nemo" else f"I call. {call(family, 1)}"
    scripted = FamilyModel(family, said, "done")
    session, first = session_of(scripted), asking(path)
    status, content = await send(session, path, first)
    assert status == 200, content
    text, calls, kept = answer_of(path, content)
    assert [(name, arguments) for _, name, arguments in calls] == [("f", {"a": 1})]
    assert text == said.removesuffix(call(family, 1)).strip()
    status, content = await send(session, path, continuing(path, first, kept, calls))
    assert status == 200, content
    assert answer_of(path, content)[:2] == ("done", [])
    check_exact(session.calls, scripted, chains=[[0, 1]])


@pytest.mark.parametrize("family", CALLS)
async def test_call_when_streamed_then_no_part_of_it_is_text(family):
    scripted, path = FamilyModel(family, f"I call. {call(family, 1)}"), "/chat/completions"

    async def step(index: int, end: int) -> None:
        return None

    scripted.step = step
    _, content = await send(session_of(scripted), path, asking(path, stream=True))
    deltas = [each["choices"][0]["delta"] for each in events_of(content)]
    assert "".join(each.get("content") or "" for each in deltas) == "I call."
    [made] = [made for each in deltas for made in each.get("tool_calls") or []]
    assert (made["function"]["name"], strict(made["function"]["arguments"])) == ("f", {"a": 1})


@pytest.mark.parametrize("family", CALLS)
async def test_calls_when_only_one_may_be_then_the_record_ends_with_it(family):
    both = f"{call(family, 1)}\n{call(family, 2)}"
    if family == "mistral-nemo":
        one, two = (call(family, number)[len("[TOOL_CALLS][") : -1] for number in (1, 2))
        both = f"[TOOL_CALLS][{one}, {two}]"
    scripted, path = FamilyModel(family, both), "/chat/completions"
    session = session_of(scripted)
    _, content = await send(session, path, asking(path, parallel_tool_calls=False))
    _, [(_, name, arguments)], _ = answer_of(path, content)
    assert (name, arguments) == ("f", {"a": 1})
    [recorded] = session.calls.merged(1.0).trajectories
    sampled = scripted.tokenizer.decode(recorded.input_ids[recorded.loss_mask].tolist())
    assert both.startswith(sampled.removeprefix("</think>"))
    assert "2" not in sampled


async def test_calls_when_the_model_repeats_an_id_then_each_has_its_own():
    scripted = FamilyModel("kimi-k2", call("kimi-k2", 0) * 2)
    _, content = await send(session_of(scripted), APIS[0], asking(APIS[0]))
    _, calls, _ = answer_of(APIS[0], content)
    assert len({known for known, _, _ in calls}) == 2


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("family", "why"),
    [("deepseek-r1", b"no place for them (f)"), ("unread", b"are not read")],
)
async def test_tools_when_they_could_not_be_called_then_the_request_is_refused(family, why, path):
    scripted = FamilyModel(family, "hi")
    scripted.tokenizer.special_tokens["bos_token"] = ""
    asked = asking(path)
    for message in asked.get("messages") or asked["input"]:
        message["content"] = "0"  # it names no tool
    status, content = await send(session_of(scripted), path, asked)
    assert status == 400
    assert why in content
    assert not scripted.requests

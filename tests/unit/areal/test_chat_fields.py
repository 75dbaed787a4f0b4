"""What a row has reaches the template, or an error names the field that does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.unit.areal.datasets.test_chats_families import FAMILIES, both
from tests.unit.areal.workflows.chat_families import template
from tests.unit.areal.workflows.test_rlvr import Engine

from areal.datasets.chats import chat_unit, pair_unit
from areal.errors import InvalidInput
from areal.tokenizer import Tokenizer
from areal.tokenizer.chat_template import ChatTemplate
from areal.types import GenerationHyperparameters
from areal.workflows.conversation import Conversation
from areal.workflows.multi_turn import MultiTurnWorkflow
from areal.workflows.rlvr import RLVRWorkflow
from areal.workflows.tool_calls import refuse_other_tools
from areal_torch.models.tiny import CHAT_TEMPLATE, END_ID, make_byte_tokenizer, save_tokenizer

TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}},
}
ASK: dict[str, Any] = {"role": "user", "content": "Oslo?"}
ANSWER: dict[str, Any] = {"role": "assistant", "content": "Rain."}


def call(arguments: Any) -> dict[str, Any]:
    asked = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [asked]}


def of(source: str | dict[str, str]) -> Tokenizer:
    return Tokenizer(make_byte_tokenizer(), chat_template=source, eos_token_ids=[END_ID])


QWEN = Tokenizer(make_byte_tokenizer(), chat_template=template("qwen2.5"))


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL]), [json.dumps(TOOL)]])
def test_tools_when_a_row_has_some_then_every_path_shows_them(tools: Any) -> None:
    expected = QWEN.render_chat([ASK], tools=[TOOL])
    assert '"name": "weather"' in expected
    (unit,) = chat_unit(QWEN, [ASK, ANSWER], tools)
    row = {"prompt": [ASK], "chosen": "Rain.", "rejected": "Sun.", "tools": tools}
    engine = Engine(template("qwen2.5"))
    prompt = RLVRWorkflow("math").prompt_ids(engine, {"messages": [ASK], "tools": tools})
    for ids in (unit["input_ids"], prompt, *(each["input_ids"] for each in pair_unit(QWEN, row))):
        assert QWEN.decode(ids).startswith(expected)
    assert QWEN.decode(Conversation(QWEN, [ASK], tools=[TOOL]).input_ids) == expected


async def test_tools_when_a_row_of_several_turns_has_some_then_they_are_shown() -> None:
    engine = Engine(template("qwen2.5"))
    workflow = MultiTurnWorkflow("math", GenerationHyperparameters(n_samples=1), max_turns=1)
    await workflow.arun_episode(engine, {"messages": [ASK], "tools": json.dumps([TOOL])})
    assert engine.requests[0].input_ids == QWEN.apply_chat_template([ASK], tools=[TOOL])


@pytest.mark.parametrize("named", [dict, list])
def test_tools_when_templates_are_named_then_the_one_for_tools_is_used(
    tmp_path: Path, named: type
) -> None:
    sources = {"default": CHAT_TEMPLATE, "tool_use": "{{ tools[0].function.name }}" + CHAT_TEMPLATE}
    save_tokenizer(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    listed = [{"name": name, "template": source} for name, source in sources.items()]
    config = {
        **json.loads(file.read_text()), "chat_template": sources if named is dict else listed
    }  # fmt: skip
    file.write_text(json.dumps(config))
    loaded = Tokenizer.load(tmp_path)
    assert loaded.render_chat([ASK], tools=[TOOL]) == "weather<|user|>Oslo?<|assistant|>"
    assert loaded.render_chat([ASK]) == "<|user|>Oslo?<|assistant|>"
    (unit,) = chat_unit(loaded, [ASK, ANSWER], [TOOL])
    assert loaded.decode(unit["input_ids"]).startswith("weather")
    del config["chat_template"]
    file.write_text(json.dumps(config))
    (tmp_path / "chat_template.jinja").write_text(sources["default"] + "é", encoding="utf-8")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(sources["tool_use"])
    loaded = Tokenizer.load(tmp_path)
    assert loaded.render_chat([ASK], tools=[TOOL]).startswith("weather")
    assert loaded.render_chat([ASK]).endswith("é")
    with pytest.raises(InvalidInput, match="none is named 'default', expected one beside rag"):
        of({"rag": CHAT_TEMPLATE}).render_chat([ASK])


SILENT = (  # leaves out tools, results of tools, calls and reasoning
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}"
    "<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}"
    "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("messages", "tools", "field"),
    [
        ([ASK, ANSWER], [TOOL], r"^tools: .*no place for them \(weather\)"),
        ([{"role": "system", "content": "S"}, ASK, ANSWER], None, r"messages\[0\]\.role: .*'sys"),
        ([ASK, call({}), ANSWER], None, r"messages\[1\]\.tool_calls\[0\]"),
        ([ASK, {"role": "tool", "content": "x"}, ANSWER], None, r"messages\[1\]\.role: .*tool"),
        ([ASK, {**ANSWER, "reasoning_content": "R"}], None, r"messages\[1\]\.reasoning_content"),
        ([ASK, {**ANSWER, "thinking": "R"}], None, r"messages\[1\]\.thinking"),
        ([ASK, {**ANSWER, "reasoning": "R"}, ASK, ANSWER], None, r"messages\[1\]\.reasoning"),
        ([ASK, {**ANSWER, "content": "<think>R</think>A"}], None, r"messages\[1\]\.content"),
        ([ASK, {**ANSWER, "function_call": {"name": "f"}}], None, "function_call"),
    ],
)  # fmt: skip
def test_row_when_the_template_leaves_out_a_part_then_refused_and_named(
    messages: list[dict[str, Any]], tools: Any, field: str
) -> None:
    with pytest.raises(InvalidInput, match=field):
        chat_unit(of(SILENT), messages, tools)
    if messages[-1] is ANSWER:
        row = {"messages": messages, "tools": tools}
        with pytest.raises(InvalidInput, match=field):
            RLVRWorkflow("math").prompt_ids(Engine(SILENT), row)


@pytest.mark.parametrize("family", ["qwen3", "glm-4.6", "minimax-m2"])
def test_row_when_earlier_reasoning_is_dropped_on_purpose_then_it_is_learned_as_the_last(
    family: str,
) -> None:
    tokenizer = Tokenizer(make_byte_tokenizer(), chat_template=template(family))
    thinking = {**ANSWER, "reasoning_content": "Clouds"}
    units = chat_unit(tokenizer, [ASK, thinking, ASK, ANSWER])
    texts = [
        tokenizer.decode([i for i, m in zip(u["input_ids"], u["loss_mask"], strict=True) if m])
        for u in units
    ]
    assert ["Clouds" in text for text in texts] == [True, False]


def test_row_when_content_is_a_list_that_would_be_printed_then_refused() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with pytest.raises(InvalidInput, match=r"messages\[0\]\.content\[0\]: .*a list of parts"):
        chat_unit(of(source), [parts, ANSWER])


@pytest.mark.parametrize("family", ["qwen2.5", "llama-3.1", "glm-4.6", "qwen3", "minimax-m2"])
def test_arguments_when_json_text_then_rendered_as_the_object(family: str) -> None:
    tokenizer = Tokenizer(make_byte_tokenizer(), chat_template=template(family))
    wanted = tokenizer.render_chat([ASK, call({"town": "Oslo", "n": 2**70})], tools=[TOOL])
    text = json.dumps({"town": "Oslo", "n": 2**70})
    assert tokenizer.render_chat([ASK, call(text)], tools=[TOOL]) == wanted
    assert "Oslo" in wanted
    flat = {
        "role": "assistant",
        "content": "",
        "tool_calls": [call(text)["tool_calls"][0]["function"]],
    }
    if family == "qwen2.5":  # a call without `function` around it
        assert tokenizer.render_chat([ASK, flat], tools=[TOOL]) == wanted


@pytest.mark.parametrize("written", ["{{ c.arguments }}", "{{ 'f(' + c.arguments + ')' }}",
                                     "{{ 'f(' ~ c.arguments ~ ')' }}"])  # fmt: skip
def test_arguments_when_the_template_writes_text_then_it_gets_text(written: str) -> None:
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% set c = c.function %}" + written + "{% endfor %}{% endfor %}"
    )
    for arguments in ('{"town":"Oslo"}', {"town": "Ålesund"}):
        text = of(source).render_chat([ASK, call(arguments)])
        expected = arguments if isinstance(arguments, str) else '{"town": "Ålesund"}'
        assert expected in text


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ("{town}", r"messages\[1\]\.tool_calls\[0\]\.function\.arguments: not JSON"),
        ("[1]", r"function\.arguments: expected a JSON object, got list"),
    ],
)
def test_arguments_when_no_object_then_refused_and_named(arguments: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        QWEN.render_chat([ASK, call(arguments)])


@pytest.mark.parametrize("tools", [{"name": "f"}, "{", [5], "[5]"])
def test_tools_when_malformed_then_refused_and_named(tools: Any) -> None:
    with pytest.raises(InvalidInput, match=r"^tools"):
        QWEN.render_chat([ASK], tools=tools)


def test_template_when_it_fails_in_any_way_then_invalid_input() -> None:
    for source in ("{{ 1 / 0 }}", "{{ messages[0].content.x.y }}", "{{ range(10**9) }}"):
        with pytest.raises(InvalidInput, match="messages: "):
            of(source).render_chat([ASK])


def test_tool_workflow_when_a_row_lists_other_tools_then_refused() -> None:
    refuse_other_tools({"tools": [TOOL]}, [TOOL])
    refuse_other_tools({}, [TOOL])
    with pytest.raises(InvalidInput, match=r"row field 'tools': 'sum', expected .*\(weather\)"):
        refuse_other_tools({"tools": [{"name": "sum"}]}, [TOOL])


@pytest.mark.parametrize(
    "bomb",
    [
        "{{ 'x' * 10**10 }}",
        "{{ 10**10 * 'x' }}",
        "{{ ['x'] * 10**9 }}",
        "{{ 9 ** (9 ** 9) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '%.9999999999f' % 1 }}",
        "{{ '%*d' % (9999999999, 1) }}",
        "{{ '%9999999999d' | format(1) }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '{a:9999999999}'.format_map({'a': 1}) }}",
        "{{ '{:{}}'.format(1, 9999999999) }}",
        "{{ 'x'.center(10**10) }}",
        "{{ 'x'.ljust(10**10) }}",
        "{{ 'x'.zfill(10**10) }}",
        "{{ 'x' | center(10**10) }}",
        "{{ 'x\\ny' | indent(10**10) }}",
        "{{ lipsum(n=100000) }}",
        "{{ cycler('a') }}",
        "{{ joiner('a') }}",
        "{{ range(10**9) | list }}",
    ],
)
def test_template_when_it_asks_for_gigabytes_then_refused_at_once(bomb: str) -> None:
    template = ChatTemplate(bomb, {})
    with pytest.raises(InvalidInput, match="chat template"):
        template.render([{"role": "user", "content": "x"}])


def test_template_when_texts_have_large_numbers_then_rendered() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ '%s: %08d' % (m.content, 12345678) }}{{ m.content | indent(2) }}"
        "{{ '{}:{:>4}'.format(m.content, 7) }}{{ '-' * 40 }}{{ m.content.replace('a', 'b') }}"
        "{% endfor %}",
        {},
    )
    text = "price: 123456789 {:99999999} %99999999d"
    shown = template.render([{"role": "user", "content": text}])
    assert shown == f"{text}: 12345678{text}{text}:   7{'-' * 40}{text.replace('a', 'b')}"


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_call_when_its_turn_has_no_content_then_it_is_that_of_an_empty_one(
    name: str, content: dict[str, None]
) -> None:
    family = FAMILIES[name]
    if not family.tools:
        return
    tokenizer = both(name)[0]
    asked = {
        **call({"town": "Oslo"}),
        "tool_calls": [{**call({"town": "Oslo"})["tool_calls"][0], "id": "call00001"}],
    }
    told = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "rain"}
    chat = [ASK, asked, told, ANSWER]
    bare = [ASK, {key: value for key, value in asked.items() if key != "content"} | content]
    assert chat_unit(tokenizer, [*bare, told, ANSWER], [TOOL]) == chat_unit(tokenizer, chat, [TOOL])


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "gpt-oss", "gemma"])
def test_content_when_it_is_a_list_that_the_template_refuses_then_named(name: str) -> None:
    parts = [{"type": "text", "text": "Oslo?"}]
    with pytest.raises(InvalidInput, match=r"^messages\[0\]\.content"):
        chat_unit(both(name)[0], [{"role": "user", "content": parts}, ANSWER])

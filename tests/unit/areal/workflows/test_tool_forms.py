"""Calls are read in each family's form, with the types that the tools declare."""

# ruff: noqa: RUF001 - the names of DeepSeek's tokens

from __future__ import annotations

import pytest
from renderers.parsing import parse_deepseek_v3, parse_kimi_k2, parse_minimax, parse_qwen35
from tests.unit.areal.datasets.test_chats_families import FAMILIES
from tests.unit.areal.workflows import chat_families
from tests.unit.areal.workflows.test_rendering_reference import Adapter

from areal.errors import InvalidInput
from areal.workflows.rendering import TemplateRenderer
from areal.workflows.tool_text import ToolCall, read_calls, split_calls


def tool(name: str, **properties):
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TEXT, WHOLE, TRUTH = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
TOOLS = [tool("look_up", zip=TEXT, n=WHOLE), tool("wait", s={"type": "number"})]
ZIP = {"zip": "12345", "n": 3}
FORMS = {
    "qwen": '<tool_call>\n{"name": "look_up", "arguments": {"zip": "12345", "n": 3}}\n</tool_call>',
    "glm": "<tool_call>look_up\n<arg_key>zip</arg_key>\n<arg_value>12345</arg_value>\n"
    "<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    "glm-4.7": "<tool_call>look_up<arg_key>zip</arg_key><arg_value>12345</arg_value>"
    "<arg_key>n</arg_key><arg_value>3</arg_value></tool_call>",
    "qwen3.5": "<tool_call>\n<function=look_up>\n<parameter=zip>\n12345\n</parameter>\n"
    "<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
    "qwen3-coder without its outer tag": "<function=look_up>\n<parameter=zip>\n12345\n</parameter>"
    "\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
    "minimax": '<minimax:tool_call>\n<invoke name="look_up">\n<parameter name="zip">12345'
    '</parameter>\n<parameter name="n">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "deepseek-v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>look_up\n"
    '```json\n{"zip": "12345", "n": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek-v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look_up<｜tool▁sep｜>"
    '{"zip": "12345", "n": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "mistral": '[TOOL_CALLS]look_up[ARGS]{"zip": "12345", "n": 3}',
    "mistral without a mark": '[TOOL_CALLS]look_up{"zip": "12345", "n": 3}',
    "phi-4-mini": '<|tool_call|>[{"name": "look_up", "arguments": {"zip": "12345", "n": 3}}]'
    "<|/tool_call|>",
    "granite-3": '<|tool_call|>[{"name": "look_up", "arguments": {"zip": "12345", "n": 3}}]',
    "nemotron": '<TOOLCALL>[{"name": "look_up", "arguments": {"zip": "12345", "n": 3}}]</TOOLCALL>',
    "gemma-4": '<|tool_call>call:look_up{zip:<|"|>12345<|"|>,n:3}<tool_call|>',
    "lfm2": "<|tool_call_start|>[look_up(zip='12345', n=3)]<|tool_call_end|>",
    "olmo-3": '<function_calls>\nlook_up(zip="12345", n=3)\n</function_calls>',
    "gpt-oss": "<|start|>assistant<|channel|>commentary to=functions.look_up <|constrain|>json"
    '<|message|>{"zip": "12345", "n": 3}',
    "gpt-oss after a preamble": "<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.look_up json<|message|>{"zip": "12345", "n": 3}<|call|>',
    "gpt-oss in its thoughts": "<|start|>assistant<|channel|>analysis to=functions.look_up code"
    '<|message|>{"zip": "12345", "n": 3}',
    "gpt-oss as its template writes it": "<|start|>assistant to=functions.look_up<|channel|>"
    'commentary json<|message|>{"zip": "12345", "n": 3}<|call|>',
}
WITH_IDS = {
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.look_up:0"
        '<|tool_call_argument_begin|>{"zip": "12345", "n": 3}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
        "functions.look_up:0",
    ),
    "mistral nemo": (
        '[TOOL_CALLS][{"name": "look_up", "arguments": {"zip": "12345", "n": 3}, '
        '"id": "abcdefghi"}]',
        "abcdefghi",
    ),
    "mistral small": (
        '[TOOL_CALLS]look_up[CALL_ID]abcdefghi[ARGS]{"zip": "12345", "n": 3}',
        "abcdefghi",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_call_when_in_a_form_of_some_family_then_read(form):
    text = f"I look. {FORMS[form]} So."
    calls, rest = split_calls(text, TOOLS)
    assert calls == (ToolCall("look_up", ZIP),)
    assert rest == "I look.  So."
    assert read_calls(FORMS[form][:-9], TOOLS) in ((), calls)  # what is cut off is no other call


@pytest.mark.parametrize("form", WITH_IDS)
def test_call_when_the_model_writes_its_id_then_it_keeps_it(form):
    text, known = WITH_IDS[form]
    assert read_calls(text, TOOLS) == (ToolCall("look_up", ZIP, known),)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (FORMS["qwen3.5"] + "\n" + FORMS["qwen3.5"], ["look_up"] * 2),
        (FORMS["mistral"] + '[TOOL_CALLS]wait[ARGS]{"s": 1}', ["look_up", "wait"]),
        (
            '[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "arguments": {}}]',
            ["a", "b"],
        ),
        # The list is cut off in its second call.
        ('[TOOL_CALLS][{"name": "a", "arguments": {}}, {"name": "b", "argum', ["a"]),
        ("<|tool_call_start|>[a(x=1), b(y=[1, {'k': (2, None)}])]<|tool_call_end|>", ["a", "b"]),
        (
            '<minimax:tool_call>\n<invoke name="a">\n</invoke>\n<invoke name="b">\n'
            '<parameter name="x">1</parameter>\n</invoke>\n</minimax:tool_call>',
            ["a", "b"],
        ),
    ],
)
def test_calls_when_several_then_all_are_read(text, names):
    assert [call.name for call in read_calls(text)] == names


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n",
        "<function=f>\n<parameter=a>\n1\n</function>",
        "[TOOL_CALLS]f[ARGS]{",
        "[TOOL_CALLS]f[ARGS]{NaN}",
        '<|tool_call>call:f{a:<|"|>x}<tool_call|>',
        "<|tool_call>call:f a:1<tool_call|>",
        "<|tool_call_start|>[f(1)]<|tool_call_end|>",
        "<|tool_call_start|>[f(a=g())]<|tool_call_end|>",
        "<|tool_call_start|>[f(a='it's')]<|tool_call_end|>",
        "<|tool_call_start|>[f(a='\\ud800')]<|tool_call_end|>",
        "<|tool_call_start|>[f(a=" + "[" * 3000 + "]" * 3000 + ")]<|tool_call_end|>",
        '<|tool_call>call:f{a:"\\ud800"}<tool_call|>',
        "<|tool_call>call:f{a:" + "[" * 3000 + "]" * 3000 + "}<tool_call|>",
    ],
)
def test_text_when_not_exactly_a_call_then_it_stays_text(text):
    assert split_calls(text, TOOLS) == ((), text)


def test_values_when_in_python_then_as_json_has_them():
    source = r"""a="q\"\n\x41\u00e9", b='{"k": [1]}', c=-1.5, d=True, e=null, f={"k": (1,)}, g=[]"""
    [call] = read_calls(f"<|tool_call_start|>[f({source})]<|tool_call_end|>")
    assert call.arguments == {
        "a": 'q"\nAé', "b": '{"k": [1]}', "c": -1.5, "d": True, "e": None, "f": {"k": [1]}, "g": [],
    }  # fmt: skip


def test_values_when_in_gemmas_quotes_then_as_json_has_them():
    source = 'a:<|"|>"{x}", [é]\n<|"|>,b:[1,true,null,<|"|>t<|"|>],c:{d:-2.5,e:{}},f:2026-01-01'
    [call] = read_calls(f"<|tool_call>call:f{{{source}}}<tool_call|>")
    assert call.arguments == {
        "a": '"{x}", [é]\n', "b": [1, True, None, "t"], "c": {"d": -2.5, "e": {}},
        "f": "2026-01-01",
    }  # fmt: skip


NULLABLE = {"anyOf": [{"type": "string"}, {"type": "null"}]}
COLOR = {"$ref": "#/$defs/Color"}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        *((TEXT, text, text) for text in ("12345", "007", "true", "null", '"q"', "[1]", "1e3")),
        (WHOLE, "3", 3),
        (WHOLE, "three", "three"),
        (TRUTH, "true", True),
        (TRUTH, "True", True),
        ({"type": "object"}, '{"k": [1]}', {"k": [1]}),
        ({"type": "array"}, "no", "no"),
        (NULLABLE, "12345", "12345"),
        (NULLABLE, "null", None),
        (NULLABLE, '"q"', '"q"'),
        ({"type": ["string", "integer"]}, "3", 3),
        ({"type": ["integer", "null"]}, "None", None),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": [1, 2]}, "1", 1),
        (COLOR, "1", "1"),
        ({}, "3", 3),
        ({}, "three", "three"),
        ({}, "True", "True"),
        # Malformed schemas declare nothing.
        *((each, "3", 3) for each in (None, 5, {"type": 5}, {"anyOf": 5}, {"$ref": "#/x/y"})),
        ({"$ref": "#/properties/a"}, "3", 3),  # itself
    ],
)
@pytest.mark.parametrize("form", ["glm", "qwen3.5", "minimax"])
def test_value_when_without_quotes_then_of_the_type_that_the_tool_declares(
    form, schema, text, expected
):
    text_of_call = {
        "glm": f"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        "qwen3.5": f"<tool_call>\n<function=f>\n<parameter=a>\n{text}\n</parameter>\n</function>\n"
        "</tool_call>",
        "minimax": f'<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">{text}</parameter>'
        "\n</invoke>\n</minimax:tool_call>",
    }[form]
    offered = tool("f", a=schema)
    offered["function"]["parameters"]["$defs"] = {"Color": {"enum": ["1", "2"]}}
    [call] = read_calls(text_of_call, [offered])
    assert call.arguments == {"a": expected}
    assert type(call.arguments["a"]) is type(expected)


@pytest.mark.parametrize(
    "parameters", [None, 5, [], {"properties": 5}, {"properties": {"zip": []}}]
)
def test_call_when_the_tool_has_a_malformed_schema_then_read_without_it(parameters):
    offered = {"type": "function", "function": {"name": "look_up", "parameters": parameters}}
    [call] = read_calls(FORMS["glm"], [offered])
    assert call.arguments == {"zip": 12345, "n": 3}


# ---------------------------------------------------------------- others' readers


MARKED = {
    "qwen3.5": (parse_qwen35, {
        "think_id": "<think>", "think_end_id": "</think>", "tool_call_id": "<tool_call>",
        "tool_call_end_id": "</tool_call>",
    }),
    "minimax": (parse_minimax, {
        "think_id": "<think>", "think_end_id": "</think>", "tool_call_id": "<minimax:tool_call>",
        "tool_call_end_id": "</minimax:tool_call>",
    }),
    "deepseek-v3": (parse_deepseek_v3, {
        "tool_calls_begin_id": "<｜tool▁calls▁begin｜>", "tool_sep_id": "<｜tool▁sep｜>",
        "tool_calls_end_id": "<｜tool▁calls▁end｜>", "tool_call_end_id": "<｜tool▁call▁end｜>",
        "tool_call_begin_id": "<｜tool▁call▁begin｜>",
    }),
    "kimi": (parse_kimi_k2, {
        "tool_calls_section_begin_id": "<|tool_calls_section_begin|>",
        "tool_calls_section_end_id": "<|tool_calls_section_end|>",
        "tool_call_begin_id": "<|tool_call_begin|>", "tool_call_end_id": "<|tool_call_end|>",
        "tool_call_argument_begin_id": "<|tool_call_argument_begin|>",
    }),
}  # fmt: skip


@pytest.mark.parametrize("form", MARKED)
def test_call_when_read_then_as_the_package_renderers_reads_it(form):
    parse, marks = MARKED[form]
    model = chat_families.build("", ["<end>"], list(marks.values()), ["<end>"])
    theirs = object.__new__(Adapter)
    theirs._tokenizer = model
    text = FORMS[form] if form in FORMS else WITH_IDS[form][0]
    ids = model.encode("I look. " + text, add_special_tokens=False)
    known = {name: model.backend.token_to_id(mark) for name, mark in marks.items()}
    more = {"tools": TOOLS} if form in ("qwen3.5", "minimax") else {}
    expected = parse(theirs, ids, stop_ids=set(), **known, **more)
    found = TemplateRenderer(model).parse(ids, TOOLS)
    assert [(c.name, c.arguments) for c in found.tool_calls] == [
        (c.name, c.arguments) for c in expected.tool_calls
    ]
    assert found.content is not None
    assert found.content.strip() == expected.content.strip()


# ---------------------------------------------------------------- templates


SAID = [{"role": "user", "content": "What is at 12345?"}]


def renderer(family: str, **variables) -> TemplateRenderer:
    known = FAMILIES[family]
    source = chat_families.template(family)
    return TemplateRenderer(
        chat_families.build(source, known.special, known.added, known.ends), **variables
    )


@pytest.mark.parametrize(
    "family",
    ["qwen2.5", "qwen3", "llama-3.1", "glm-4.6", "minimax-m2", "mistral-nemo", "kimi-k2",
     "granite-4.0", "gpt-oss"],
)  # fmt: skip
def test_tools_when_the_template_shows_them_and_its_calls_are_read_then_fine(family):
    renderer(family).check_tools(SAID, TOOLS)


@pytest.mark.parametrize("family", ["deepseek-r1", "deepseek-v3.1", "phi-3.5", "gemma", "smollm3"])
def test_tools_when_the_template_has_no_place_for_them_then_refused(family):
    ours = renderer(family)
    with pytest.raises(InvalidInput, match=r"tools: .* no place for them \(look_up, wait\)"):
        ours.check_tools(SAID, TOOLS)
    # The agent may tell of them itself.
    ours.check_tools([{"role": "user", "content": "Call look_up."}], TOOLS)


def test_tools_when_a_variable_shows_them_then_fine():
    renderer("smollm3", xml_tools=["look_up", "wait"]).check_tools(SAID, TOOLS)


def test_tools_when_calls_are_in_a_form_that_is_not_read_then_refused():
    source = chat_families.template("qwen2.5").replace("<tool_call>", "<some_call>")
    model = chat_families.build(source, ["<|im_end|>", "<|im_start|>"], [], ["<|im_end|>"])
    with pytest.raises(InvalidInput, match=r"tools: calls in the form .*some_call.*probe"):
        TemplateRenderer(model).check_tools(SAID, TOOLS)


def test_text_when_a_mark_is_a_special_token_then_it_is_in_the_text():
    ours = renderer("mistral-nemo")
    model = ours._tokenizer
    ids = model.encode("Sure." + FORMS["mistral"] + "</s>", add_special_tokens=False)
    reply = ours.parse(ids, TOOLS)
    assert reply.text == "Sure." + FORMS["mistral"]
    assert (reply.tool_calls, reply.content) == ((ToolCall("look_up", ZIP),), "Sure.")


@pytest.mark.parametrize(
    ("opens", "closes"), [("[THINK]", "[/THINK]"), ("<|channel>thought\n", "<channel|>")]
)
def test_thought_when_its_marks_are_special_tokens_then_its_calls_are_none(opens, closes):
    special = ["</s>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>", "[TOOL_CALLS]"]
    model = chat_families.build("", special, [], ["</s>"])
    text = f"{opens}Maybe {FORMS['mistral']}?{closes}46"
    reply = TemplateRenderer(model).parse(model.encode(text, add_special_tokens=False), TOOLS)
    assert (reply.tool_calls, reply.content) == ((), "46")


@pytest.mark.parametrize(
    ("family", "text", "called"),
    [
        ("llama-3.1", '{"name": "look_up", "parameters": {"n": 3}}', True),
        ("llama-3.1", '<|python_tag|>{"name": "look_up", "parameters": {"n": 3}}<|eom_id|>', True),
        ("llama-3.1", '{"name": "Bob", "parameters": {"n": 3}}', False),
        ("qwen2.5", '{"name": "look_up", "arguments": {"n": 3}}', False),
        ("glm-4.6", '{"name": "look_up", "arguments": {"n": 3}}', False),
        # In the family's own marks, so that an agent can say that there is no such tool.
        ("qwen2.5", '<tool_call>{"name": "Bob", "arguments": {"n": 3}}</tool_call>', True),
    ],
)
def test_object_when_it_is_the_whole_answer_then_a_call_only_where_the_family_writes_it_so(
    family, text, called
):
    ours = TemplateRenderer(chat_families.tokenizer(family))
    reply = ours.parse(chat_families.tokenizer(family).encode(text), TOOLS)
    assert [call.arguments for call in reply.tool_calls] == [{"n": 3}] * called
    assert reply.content == ("" if called else text)

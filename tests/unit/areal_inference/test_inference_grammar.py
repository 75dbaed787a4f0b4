"""Grammars of requests: what they allow, and what is refused in one line."""

from __future__ import annotations

import builtins
import json

import pytest

from areal_inference.decode.grammar import Grammar, GrammarError, Grammars
from areal_torch.models.tiny import END_ID, VOCAB_SIZE, make_byte_tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'
SPACE = {"type": "regex", "pattern": "\\s*"}
ANY = {"type": "any_text"}


def call(name):
    return {
        "type": "tag",
        "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
        "content": {"type": "json_schema", "json_schema": SCHEMA},
        "end": "}\n</tool_call>",
    }


def calls(**more):
    tags = [call("f"), call("g")]
    return {"type": "tags_with_separator", "tags": tags, "separator": "\n", **more}


def sequence(*elements):
    return {"type": "sequence", "elements": list(elements)}


def thought(begin):
    return {"type": "tag", "begin": begin, "content": ANY, "end": "</think>"}


@pytest.fixture(scope="module")
def grammars():
    return Grammars(make_byte_tokenizer().to_str(), VOCAB_SIZE, [END_ID])


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether this is a whole answer."""
    for token in [*text.encode(), END_ID]:
        if not grammar.allowed()[token]:
            return False
        grammar.accept(token)
    return True


MANY = calls(at_least_one=True, stop_after_first=False)
ONE = calls(at_least_one=True, stop_after_first=True)
OPENED = sequence(thought(""), SPACE, MANY)
MAY_THINK = sequence({"type": "optional", "content": sequence(thought("<think>"), SPACE)}, MANY)
EITHER = {"type": "or", "elements": [ONE, {"type": "json_schema", "json_schema": SCHEMA}]}


@pytest.mark.parametrize(
    ("form", "yes", "no"),
    [
        (
            MANY,
            [CALL, f"{CALL}\n{CALL}"],
            ["", f"{CALL} ", CALL.replace('"f"', '"h"'), f"{CALL}\n"],
        ),
        (ONE, [CALL, CALL.replace('"f"', '"g"')], ["", f"{CALL}\n{CALL}"]),
        (calls(), ["", CALL], [" "]),
        (OPENED, [f"1 < 2</think>\n\n{CALL}", f"</think>{CALL}"], [CALL, f"a</think>b{CALL}"]),
        (MAY_THINK, [f"<think>hm</think>\n\n{CALL}", CALL], [f"hm{CALL}", "<think>hm</think>"]),
        (EITHER, [CALL, '{"a": 12, "b": "y"}', '{"a":1,"b":"x"}'], ['{"a":1}', '{"b":"x"}', "1"]),
        ({"type": "const_string", "value": 'a"\n/'}, ['a"\n/'], ["a"]),
        ({"type": "regex", "pattern": "a/b|c"}, ["a/b", "c"], ["d", "a"]),
    ],
)
def test_tag_when_compiled_then_allows_exactly_its_texts(grammars, form, yes, no):
    for text in [*yes, *no]:
        grammar = grammars.compile("structural_tag", json.dumps({"format": form}))
        assert accepts(grammar, text) == (text in yes), text


def test_schema_and_regex_when_compiled_then_copies_are_independent(grammars):
    first = grammars.compile("json_schema", json.dumps(SCHEMA))
    second = first.copy()
    assert accepts(first, '{"a": 1, "b": "x"}')
    assert accepts(second, '{"a": 1, "b": "y"}')
    assert not accepts(grammars.compile("regex", "[0-9]+"), "12a")
    assert accepts(grammars.compile("regex", "[0-9]+"), "12")


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("json_schema", '{"type": "objekt"}', "Invalid type: objekt"),
        ("json_schema", "{", "expected"),
        ("regex", "(", "unclosed group"),
        ("structural_tag", '{"format": {"type": "any_text"}}', "format 'any_text': not supported"),
        ("structural_tag", "{}", "format"),
        ("structural_tag", "[]", "list indices"),
        (
            "structural_tag",
            '{"format": {"type": "json_schema", "json_schema": {}, "style": "glm_xml"}}',
            "style 'glm_xml': not supported",
        ),
    ],
)
def test_grammar_when_it_cannot_be_compiled_then_one_line_says_why(grammars, kind, value, said):
    with pytest.raises(GrammarError) as caught:
        grammars.compile(kind, value)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_grammars_when_the_package_is_missing_then_says_so(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "llguidance":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(GrammarError, match="no constrained decoding: llguidance is not installed"):
        Grammars(make_byte_tokenizer().to_str(), VOCAB_SIZE, [END_ID])


def test_grammar_when_its_matcher_gives_up_then_only_the_end_is_allowed(grammars):
    grammar = grammars.compile("regex", "ab")
    grammar.accept(ord("z"))  # no sampler would: it was not allowed
    assert grammar.allowed().nonzero()[0].tolist() == [END_ID]

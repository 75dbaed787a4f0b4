"""Where a history first differs from an earlier one is told, and other conversations are not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from areal.agents.splits import equal, explain

FIRST = [
    (False, "S: it is 12:00. U: hi A: "),
    (True, "hello."),
    (False, " U: more A: "),
    (True, "no"),
]


def after_first(prompt):
    _, why = explain([FIRST, [(False, prompt), (True, "x")]])
    return why


def test_prompt_when_an_earlier_message_changes_then_both_texts_are_told():
    why = after_first("S: it is 12:01. U: hi A: hello. U: more A: ")
    assert why.startswith("before answer 0 of sample 0: ")
    assert "12:01. U: hi" in why
    assert "12:00. U: hi" in why
    assert after_first("S: it is 12:00. U: hi A: hello. U: mor A: no U: A: ").startswith(
        "before answer 1 of sample 0"
    )


def test_prompt_when_an_answer_changes_then_it_is_named():
    why = after_first("S: it is 12:00. U: hi A: Hello. U: more A: ")
    assert why.startswith("in answer 0 of sample 0: ")


def test_prompt_when_it_is_a_branch_or_another_conversation_then_nothing_is_told():
    assert after_first("S: it is 12:00. U: hi A: ") == ""
    assert after_first("S: it is 12:00. U: hi A: hello. U: other A: ") == ""
    assert after_first("S: it is 12:00. U: what? A: ") == ""
    assert explain([]) == []


def test_equal_characters_when_any_texts_then_as_many_as_their_common_start():
    long = "x" * 10_000
    for one, other, same in [
        (long, long, 10_000),
        (long, long[:5000] + "y" + long, 5000),
        (long, "", 0),
        (long[:4096], long, 4096),
        ("y" + long, long, 0),
    ]:
        assert equal(one, other) == equal(other, one) == same


@given(st.lists(st.lists(st.tuples(st.booleans(), st.text(max_size=5)), max_size=4), max_size=4))
def test_samples_when_any_then_one_line_each(samples):
    assert len(explain(samples)) == len(samples)

"""Preference rows: whatever form they have, the question is there once, and the answers differ."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal.datasets.chats import pair_unit
from areal.errors import InvalidInput
from areal.tokenizer import Tokenizer
from areal_torch.models.tiny import CHAT_TEMPLATE, make_byte_tokenizer

Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


SYSTEM = {"role": "system", "content": "Add."}
TOKENIZER = Tokenizer(make_byte_tokenizer(), chat_template=CHAT_TEMPLATE, eos_token_ids=[260])


def texts(row: dict[str, Any]) -> list[tuple[str, str]]:
    """The whole text of each sequence, and what is learned of it."""
    found = []
    for unit in pair_unit(TOKENIZER, row):
        ids, mask = unit["input_ids"], unit["loss_mask"]
        learned = [i for i, m in zip(ids, mask, strict=True) if m]
        found.append((TOKENIZER.decode(ids), TOKENIZER.decode(learned)))
    return found


ONE = "<|user|>2+2=<|assistant|>"


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
        {"prompt": "2+2=", "chosen": answer("4"), "rejected": answer("5")},
        {"prompt": [user("2+2=")], "chosen": [answer("4")], "rejected": [answer("5")]},
        {"prompt": user("2+2="), "chosen": "4", "rejected": "5"},
        {"chosen": [user("2+2="), answer("4")], "rejected": [user("2+2="), answer("5")]},
        {"prompt": "2+2=", "chosen": [user("2+2="), answer("4")],
         "rejected": [user("2+2="), answer("5")]},
        {"prompt": "2+2= ", "chosen": [user("2+2="), answer("4")],
         "rejected": [user("2+2="), answer("5")]},
        {"prompt": [user("2+2=")], "chosen": [user("2+2="), answer("4")],
         "rejected": [user("2+2="), answer("5")]},
        {"prompt": None, "chosen": [user("2+2="), answer("4")],
         "rejected": [{**user("2+2="), "name": None}, answer("5")]},
    ],
)  # fmt: skip
def test_pair_when_in_any_form_then_the_question_is_there_once(row: dict[str, Any]) -> None:
    assert texts(row) == [(f"{ONE}4<|end|>", "4<|end|>"), (f"{ONE}5<|end|>", "5<|end|>")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [SYSTEM, user("2+2=")], "chosen": "4", "rejected": "5"},
        {"prompt": [SYSTEM], "chosen": [user("2+2="), answer("4")],
         "rejected": [user("2+2="), answer("5")]},
        {"prompt": [SYSTEM, user("2+2=")], "chosen": [user("2+2="), answer("4")],
         "rejected": [user("2+2="), answer("5")]},
        {"prompt": [user("2+2=")], "chosen": [SYSTEM, user("2+2="), answer("4")],
         "rejected": [SYSTEM, user("2+2="), answer("5")]},
        {"prompt": "2+2=", "chosen": [SYSTEM, user("2+2="), answer("4")],
         "rejected": [SYSTEM, user("2+2="), answer("5")]},
    ],
)  # fmt: skip
def test_pair_when_there_is_a_system_message_then_it_is_there_once(row: dict[str, Any]) -> None:
    assert [whole for whole, _ in texts(row)] == [
        f"<|system|>Add.{ONE}{said}<|end|>" for said in "45"
    ]


def test_pair_when_the_chats_share_turns_then_only_those_that_differ_are_learned() -> None:
    begin = [user("2+2="), answer("4"), user("3+3=")]
    row = {"prompt": "2+2=", "chosen": [*begin, answer("6")], "rejected": [*begin, answer("7")]}
    assert [learned for _, learned in texts(row)] == ["6<|end|>", "7<|end|>"]
    row = {
        "chosen": [user("2+2="), answer("4"), user("ok?"), answer("yes")],
        "rejected": [user("2+2="), answer("5"), user("no?"), answer("so")],
    }
    assert [learned for _, learned in texts(row)] == ["4<|end|>yes<|end|>", "5<|end|>so<|end|>"]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "2+2=", "chosen": "4"}, "no field 'rejected'"),
        ({"chosen": [user("a"), answer("b")], "rejected": [user("a")]},
         "'rejected' does not end with"),
        ({"chosen": "4", "rejected": "5"}, "'chosen' is text, so expected a 'prompt'"),
        ({"chosen": [answer("4")], "rejected": [answer("5")]}, "first differ in message 0"),
        ({"chosen": [user("a"), answer("b")], "rejected": [user("c"), answer("d")]},
         "first differ in message 0, of roles 'user' and 'user'"),
        ({"chosen": [user("a"), answer("b"), user("c"), answer("d")],
          "rejected": [user("a"), answer("b"), user("e"), answer("f")]},
         "first differ in message 2"),
        ({"chosen": [user("a"), answer("b")],
          "rejected": [user("a"), answer("b"), user("e"), answer("f")]}, "only continues"),
        ({"prompt": "x", "chosen": [user("a"), answer("b")],
          "rejected": [user("a"), answer("c")]}, "does not contain the 'prompt'"),
        ({"prompt": [user("x")], "chosen": [user("a"), answer("b")],
          "rejected": [user("a"), answer("c")]}, "does not contain the 'prompt'"),
        ({"prompt": 5, "chosen": "b", "rejected": "c"}, "prompt"),
        ({"prompt": "q", "chosen": ["b"], "rejected": "c"}, r"chosen: messages\[0\]"),
    ],
)  # fmt: skip
def test_pair_when_there_is_no_one_prompt_then_refused(row: dict[str, Any], why: str) -> None:
    with pytest.raises(InvalidInput, match=why) as caught:
        pair_unit(TOKENIZER, row)
    assert "\n" not in str(caught.value)


WORD = st.text("abc", min_size=1, max_size=3)


@given(
    system=st.lists(WORD, max_size=1),
    turns=st.lists(st.tuples(WORD, WORD), max_size=2),
    question=WORD,
    said=st.lists(WORD, min_size=2, max_size=2, unique=True),
)
def test_pair_when_one_chat_is_written_in_all_forms_then_the_tokens_are_the_same(
    system: list[str], turns: list[tuple[str, str]], question: str, said: list[str]
) -> None:
    prompt: list[Message] = [{"role": "system", "content": text} for text in system]
    for asked, answered in turns:
        prompt += [user(asked), answer(answered)]
    prompt.append(user(question))
    chosen, rejected = (answer(text) for text in said)
    expected = pair_unit(TOKENIZER, {"prompt": prompt, "chosen": said[0], "rejected": said[1]})
    whole = {"chosen": [*prompt, chosen], "rejected": [*prompt, rejected]}
    first = next(message["content"] for message in prompt if message["role"] == "user")
    for row in (
        {"prompt": prompt, "chosen": [chosen], "rejected": [rejected]},
        whole,
        {"prompt": prompt, **whole},
        {"prompt": first, **whole},
    ):
        assert pair_unit(TOKENIZER, row) == expected

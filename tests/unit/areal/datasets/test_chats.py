"""Which tokens of a chat are learned: each turn of the assistant, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal.datasets.chats import chat_unit, pair_unit
from areal.errors import InvalidInput
from areal.models.tiny import make_byte_tokenizer, save_tokenizer
from areal.tokenizer import Tokenizer

TEMPLATES = Path(__file__).parents[1] / "workflows" / "chat_templates"
CHAT = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "3+3="},
    {"role": "assistant", "content": "6 \u00e9"},
]
MARKED = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}\n"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
FORGETFUL = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last else m.content[:1] }}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(folder)
    return Tokenizer.load(folder)


def with_template(template: str) -> Tokenizer:
    return Tokenizer(make_byte_tokenizer(), chat_template=template, eos_token_ids=[260])


def learned(tokenizer: Tokenizer, unit: dict) -> str:
    """The loss tokens as text, each run of them in brackets."""
    said, before = "", False
    for token, chosen in zip(unit["input_ids"], unit["loss_mask"], strict=True):
        said += f"{'|' if chosen and not before else ''}"
        said += tokenizer.decode([token]) if chosen and token < 128 else ""
        said += "$" if chosen and token == 260 else ""
        before = chosen
    return said


def test_chat_when_of_several_turns_then_each_of_the_assistants_is_learned(tokenizer) -> None:
    (unit,) = chat_unit(tokenizer, CHAT)
    assert unit["input_ids"] == tokenizer.apply_chat_template(CHAT, add_generation_prompt=False)
    assert learned(tokenizer, unit) == "|4$|6 $"
    assert sum(unit["loss_mask"]) == 2 + 5, "two bytes of \u00e9 too"


def test_chat_when_the_template_marks_turns_then_it_is_believed() -> None:
    tokenizer = with_template(MARKED)
    (unit,) = chat_unit(tokenizer, CHAT)
    assert unit["input_ids"] == tokenizer.apply_chat_template(CHAT)
    assert learned(tokenizer, unit) == "|4$|6 $", "the line end behind a turn is not learned"


@pytest.mark.parametrize("name", ["qwen2.5", "llama-3.1"])
def test_chat_when_of_a_common_family_then_the_prompt_is_what_a_server_would_be_sent(name) -> None:
    template = (TEMPLATES / f"{name}.jinja").read_text()
    tokenizer = Tokenizer(
        make_byte_tokenizer(), chat_template=template, special_tokens={"bos_token": "<s>"}
    )
    (unit,) = chat_unit(tokenizer, CHAT)
    text = tokenizer.decode(unit["input_ids"])
    first = unit["loss_mask"].index(True)
    prompt = tokenizer.apply_chat_template(CHAT[:2])
    assert unit["input_ids"][:first] == prompt, text
    assert text == tokenizer.render_chat(CHAT, add_generation_prompt=False)


def test_chat_when_the_template_rewrites_turns_then_refused_in_one_line() -> None:
    with pytest.raises(InvalidInput, match=r"messages\[2\]: .* changes this turn") as caught:
        chat_unit(
            with_template(FORGETFUL), [*CHAT[:2], {"role": "assistant", "content": "44"}, *CHAT[3:]]
        )
    assert "\n" not in str(caught.value)


def test_chat_when_no_turn_is_the_assistants_then_refused(tokenizer) -> None:
    with pytest.raises(InvalidInput, match="no assistant turn"):
        chat_unit(tokenizer, CHAT[:2])


def test_chat_when_text_holds_the_mark_then_refused() -> None:
    with pytest.raises(InvalidInput, match="no character that marks"):
        chat_unit(with_template(MARKED), [*CHAT[:4], {"role": "assistant", "content": "\ufdd0x"}])


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
        {
            "prompt": [{"role": "user", "content": "2+2="}],
            "chosen": [{"role": "assistant", "content": "4"}],
            "rejected": [{"role": "assistant", "content": "5"}],
        },
        {
            "chosen": [CHAT[1], {"role": "assistant", "content": "4"}],
            "rejected": [CHAT[1], {"role": "assistant", "content": "5"}],
        },
    ],
)
def test_pair_when_in_any_form_then_the_two_answers_are_learned(tokenizer, row) -> None:
    chosen, rejected = pair_unit(tokenizer, row)
    assert learned(tokenizer, chosen) == "|4$"
    assert learned(tokenizer, rejected) == "|5$"
    assert len(chosen["input_ids"]) == len(rejected["input_ids"]) == 8


def test_pair_when_the_prompt_holds_turns_then_only_the_last_is_learned(tokenizer) -> None:
    row = {"prompt": CHAT[:4], "chosen": "6", "rejected": "7"}
    chosen, rejected = pair_unit(tokenizer, row)
    assert (learned(tokenizer, chosen), learned(tokenizer, rejected)) == ("|6$", "|7$")


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "2+2=", "chosen": "4"}, "no field 'rejected'"),
        ({"chosen": CHAT, "rejected": CHAT[:2]}, "'rejected' does not end with"),
    ],
)
def test_pair_when_something_is_missing_then_says_what(tokenizer, row, why) -> None:
    with pytest.raises(InvalidInput, match=why):
        pair_unit(tokenizer, row)

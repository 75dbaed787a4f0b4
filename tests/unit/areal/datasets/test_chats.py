"""Which tokens of a chat are learned: each turn of the assistant, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal.datasets.chats import chat_unit, chat_units, pair_units
from areal.errors import InvalidInput
from areal.tokenizer import Tokenizer
from areal_torch.models.tiny import make_byte_tokenizer, save_tokenizer

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

REWRITING = FORGETFUL.replace("loop.last", "loop.last or m.role != 'assistant'").replace(
    "{% endfor %}", "{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
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


def test_chat_when_the_template_rewrites_turns_then_each_is_learned_as_the_last_one() -> None:
    tokenizer = with_template(REWRITING)
    chat = [*CHAT[:2], {"role": "assistant", "content": "44"}, *CHAT[3:]]
    first, whole = chat_unit(tokenizer, chat)
    assert first["input_ids"] == tokenizer.apply_chat_template(
        chat[:3], add_generation_prompt=False
    )
    assert (learned(tokenizer, first), learned(tokenizer, whole)) == ("|44$", "|6 $")


@pytest.mark.parametrize("edge", ["{%- NAME %}", "{%- NAME -%}", "{% NAME -%}", "{%NAME%}",
                                  "{%+ NAME %}", "{%-\n  NAME\n-%}"])  # fmt: skip
def test_chat_when_marks_are_in_any_spelling_then_they_are_found(edge: str) -> None:
    begin, end = edge.replace("NAME", "generation"), edge.replace("NAME", "endgeneration")
    tokenizer = with_template(
        "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}"
        + begin
        + "{{ m.content if loop.last else m.content[:1] }}<|end|>"
        + end
        + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    (unit,) = chat_unit(tokenizer, CHAT)
    assert unit["input_ids"] == tokenizer.apply_chat_template(CHAT)
    assert learned(tokenizer, unit) == "|4$|6 $"


def test_chat_when_the_template_only_mentions_marks_then_it_has_none() -> None:
    source = "{# {% generation %} #}{{ '{% generation %}' if false }}" + REWRITING
    (unit,) = chat_unit(with_template(source), CHAT[:3])
    assert learned(with_template(source), unit) == "|4$"


def test_chat_when_the_template_rewrites_the_prompt_then_refused_in_one_line() -> None:
    with pytest.raises(InvalidInput, match=r"messages\[4\]: .* changes the prompt") as caught:
        chat_unit(with_template(FORGETFUL), CHAT)
    assert "\n" not in str(caught.value)


def test_chat_when_marks_stop_before_the_end_of_a_turn_then_the_end_is_learned() -> None:
    source = MARKED.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")
    (unit,) = chat_unit(with_template(source), CHAT)
    assert learned(with_template(source), unit) == "|4$|6 $"


def test_chat_when_no_token_ends_a_turn_then_refused_and_named() -> None:
    source = MARKED.replace("<|end|>", "")
    with pytest.raises(InvalidInput, match=r"messages\[2\]: .*none of the tokens that end .*260"):
        chat_unit(with_template(source), CHAT)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [((0, 1), "|6 $"), ((1, 0), "|4$"), ((1.0, None), "|4$|6 $"), ((False, True), "|6 $")],
)
def test_chat_when_turns_have_weights_then_those_of_0_are_not_learned(
    tokenizer, weights, expected
) -> None:
    chat = [dict(message) for message in CHAT]
    chat[2]["weight"], chat[4]["weight"] = weights
    assert "".join(learned(tokenizer, each) for each in chat_unit(tokenizer, chat)) == expected


@pytest.mark.parametrize(
    ("index", "more", "why"),
    [
        (2, {"weight": 0.5}, r"messages\[2\]\.weight 0\.5: expected 0 or 1"),
        (2, {"weight": "0"}, r"messages\[2\]\.weight '0'"),
        (1, {"weight": 1}, r"messages\[1\]\.weight 1: .*only for the assistant"),
        (2, {"train": False}, r"messages\[2\]\.train: expected 'weight': 0"),
    ],
)
def test_chat_when_a_weight_means_something_else_then_refused(tokenizer, index, more, why) -> None:
    chat = [dict(message) for message in CHAT]
    chat[index] |= more
    with pytest.raises(InvalidInput, match=why):
        chat_unit(tokenizer, chat)
    if index == 2 and "weight" in more:
        chat[2]["weight"] = chat[4]["weight"] = 0
        with pytest.raises(InvalidInput, match="no assistant turn"):
            chat_unit(tokenizer, chat)


def test_chats_when_a_row_cannot_be_used_then_its_number_is_named(tokenizer) -> None:
    good = {"messages": CHAT}
    with pytest.raises(InvalidInput, match=r"row 2: no field 'messages' among \['text'\]"):
        chat_units(tokenizer, [good, {"text": "x"}])
    with pytest.raises(InvalidInput, match=r"row 2: tools: the chat template has no place"):
        chat_units(tokenizer, [good, {"messages": CHAT, "tools": [{"name": "f"}]}])
    short = Tokenizer(
        make_byte_tokenizer(), chat_template=tokenizer.chat_template, eos_token_ids=[260], longest=9
    )
    with pytest.raises(InvalidInput, match=r"row 1: 24 tokens, expected at most 9"):
        chat_units(short, [good])
    small = Tokenizer(make_byte_tokenizer(), chat_template=tokenizer.chat_template, vocab_size=258)
    with pytest.raises(InvalidInput, match=r"row 1: token id 260, expected less than 258"):
        pair_units(small, [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}])


def test_chat_when_no_turn_is_the_assistants_then_refused(tokenizer) -> None:
    with pytest.raises(InvalidInput, match="no assistant turn"):
        chat_unit(tokenizer, CHAT[:2])


def test_chat_when_text_holds_the_mark_then_refused() -> None:
    with pytest.raises(InvalidInput, match="no character that marks"):
        chat_unit(with_template(MARKED), [*CHAT[:4], {"role": "assistant", "content": "\ufdd0x"}])


@pytest.mark.parametrize("content", [None, 42, float("nan")])
def test_chats_when_a_content_is_no_text_then_the_message_is_named(
    tokenizer: Tokenizer, content: Any
) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content}]
    said = rf"messages\[1\]\.content {content}: expected text"
    with pytest.raises(InvalidInput, match=f"^row 1: {said}"):
        chat_units(tokenizer, [{"messages": messages}])
    with pytest.raises(InvalidInput, match=f"^row 1: rejected: {said}"):
        pair_units(tokenizer, [{"prompt": "q", "chosen": "a", "rejected": messages[1:]}])

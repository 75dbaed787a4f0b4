"""Chats of every family: the ids are transformers', and the loss covers what a server samples."""

# ruff: noqa: RUF001 - the names of DeepSeek's tokens

from __future__ import annotations

import json
from functools import cache
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.areal.workflows import chat_families
from transformers import PreTrainedTokenizerFast

from areal.datasets.chats import chat_unit, pair_unit
from areal.errors import InvalidInput
from areal.tokenizer import Tokenizer


class Family(NamedTuple):
    """Its tokens, as in `chat_families.FAMILIES`, and what its template has a place for."""

    special: list[str]
    added: list[str]
    ends: list[str]
    system: bool = True
    tools: bool = True
    calls: int = 2
    reasoning: bool = False
    thought: str = "reasoning_content"
    text_beside_call: bool = True


def known(name: str, **has: Any) -> Family:
    return Family(*chat_families.FAMILIES[name], **has)


FAMILIES = {
    "qwen2.5": known("qwen2.5"),
    "qwen3": known("qwen3", reasoning=True),
    "llama-3.1": known("llama-3.1", calls=1, text_beside_call=False),
    "glm-4.6": known("glm-4.6", reasoning=True),
    "minimax-m2": known("minimax-m2", reasoning=True),
    # The system message is shown only where a prompt ends.
    "mistral-nemo": Family(
        ["</s>", "<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
         "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        [], ["</s>"], system=False, text_beside_call=False,
    ),
    "deepseek-r1": Family(
        ["<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
        ["<think>", "</think>"], ["<｜end▁of▁sentence｜>"], tools=False, calls=0,
    ),
    "deepseek-v3.1": Family(
        ["<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"],
        ["<think>", "</think>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>",
         "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"],
        ["<｜end▁of▁sentence｜>"], tools=False,
    ),
    "phi-3.5": Family(
        ["<|end|>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"],
        [], ["<|endoftext|>", "<|end|>"], tools=False, calls=0,
    ),
    # Reasoning before a call goes once the answer follows.
    "gpt-oss": Family(
        ["<|return|>", "<|call|>", "<|endoftext|>", "<|end|>", "<|start|>", "<|channel|>",
         "<|message|>", "<|constrain|>"],
        [], ["<|return|>", "<|call|>", "<|endoftext|>"], calls=1, reasoning=True,
        thought="thinking", text_beside_call=False,
    ),
    "smollm3": Family(
        ["<|im_end|>", "<|end_of_text|>", "<|im_start|>"], [], ["<|im_end|>"],
        tools=False, calls=0,
    ),
    "kimi-k2": Family(
        ["<|im_end|>", "[EOS]", "<|im_system|>", "<|im_user|>", "<|im_assistant|>",
         "<|im_middle|>"],
        ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
         "<|tool_call_argument_begin|>", "<|tool_call_end|>"],
        ["[EOS]", "<|im_end|>"],
    ),
    "granite-4.0": Family(
        ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"], [], ["<|end_of_text|>"]
    ),
    "gemma": Family(
        ["<end_of_turn>", "<eos>", "<start_of_turn>"], [], ["<eos>", "<end_of_turn>"],
        system=False, tools=False, calls=0,
    ),
}  # fmt: skip
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a town.",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}
TEXT = st.text("ab é数\n'{}", max_size=6)


@cache
def both(name: str) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    family = FAMILIES[name]
    special = list(dict.fromkeys([*family.special, "<|begin_of_text|>"]))
    ours = chat_families.build(chat_families.template(name), special, family.added, family.ends)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=ours.backend,
        chat_template=ours.chat_template,
        **ours.special_tokens,
    )
    # Its constructor may add the named tokens; the ids must stay those of ours.
    assert theirs.convert_tokens_to_ids(family.ends[0]) == ours.eos_token_ids[0]
    return ours, theirs


@st.composite
def chats(draw: Any, family: Family) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """A chat with a word of its own in each message; arguments are objects."""
    messages: list[dict[str, Any]] = []

    def say(role: str, **more: Any) -> None:
        words = f"word{len(messages)}x"
        messages.append({"role": role, "content": f"{words}{draw(TEXT)}.", **more})

    def answer() -> dict[str, Any]:
        message = messages[-1]
        if family.reasoning and draw(st.booleans()):
            message[family.thought] = f"thought{len(messages)}x"
        return message

    if family.system and draw(st.booleans()):
        say("system")
    for _ in range(draw(st.integers(1, 3))):
        say("user")
        calls = draw(st.integers(0, family.calls))
        if calls:
            say("assistant")
            asking = answer()
            beside = family.text_beside_call and draw(st.booleans())
            asking["content"] = asking["content"] if beside else ""
            place = f"word{len(messages) - 1}x{draw(TEXT)}"
            asking["tool_calls"] = [
                {
                    "id": f"call0000{n}",
                    "type": "function",
                    "function": {"name": "weather", "arguments": {"town": place, "n": n}},
                }
                for n in range(calls)
            ]
            for n in range(calls):
                say("tool", name="weather", tool_call_id=f"call0000{n}")
        say("assistant")
        last = answer()
        if draw(st.integers(0, 3)) == 0:
            last["content"] = ""
    offered = [TOOL] if family.tools and draw(st.booleans()) else None
    return messages, offered


def begins(ids: list[int], whole: list[int]) -> bool:
    """Whether a sequence is `whole`, perhaps with an end."""
    return ids[: len(whole)] == whole and len(ids) <= len(whole) + 1


def as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The chat with the arguments of its calls as JSON text, as OpenAI's API has them."""
    written = json.loads(json.dumps(messages))
    for message in written:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return written


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_chat_when_of_any_family_then_ids_are_transformers_and_the_loss_is_what_is_sampled(
    name: str, data: st.DataObject
) -> None:
    ours, theirs = both(name)
    messages, tools = data.draw(chats(FAMILIES[name]))

    @cache
    def rendered(count: int, prompt: bool = False) -> list[int]:
        found: list[int] = theirs.apply_chat_template(
            messages[:count], tools=tools, add_generation_prompt=prompt, return_dict=False
        )
        return found

    given_as = data.draw(st.sampled_from([messages, as_text(messages)]))
    unit = chat_unit(ours, given_as, tools)
    turns = [n for n, message in enumerate(messages) if message["role"] == "assistant"]
    learned: dict[int, list[int]] = {}
    for sequence in unit:
        ids, mask = sequence["input_ids"], sequence["loss_mask"]
        counts = [len(messages), *(turn + 1 for turn in reversed(turns))]
        count = next((c for c in counts if begins(ids, rendered(c))), None)
        if count is None:  # the turn changes its own prompt
            prompts = [(turn, rendered(turn, True)) for turn in reversed(turns)]
            count = next(t for t, prompt in prompts if ids[: len(prompt)] == prompt) + 1
        else:
            more = ids[len(rendered(count)) :]
            assert set(more) <= set(ours.eos_token_ids), "only an end is added"
        edges = [n for n, (a, b) in enumerate(pairwise([False, *mask, False])) if a != b]
        for begin, end in zip(edges[::2], edges[1::2], strict=True):
            mine = [t for t in turns if t < count and len(rendered(t, True)) <= begin + 4]
            learned[mine[-1]] = ids[begin:end]
    assert sorted(learned) == turns, "each turn is learned"
    assert len(learned) == sum(
        sum(b and not a for a, b in pairwise([False, *sequence["loss_mask"]])) for sequence in unit
    ), "once"
    for turn, ids in learned.items():
        prompt, whole = rendered(turn, True), rendered(turn + 1)
        if whole[: len(prompt)] == prompt:
            rest = whole[len(prompt) :]
            end = next((n for n, i in enumerate(rest) if i in ours.eos_token_ids), len(rest))
            assert ids[:-1] == rest[:end]
        assert ids[-1] in ours.eos_token_ids
        assert not set(ids[:-1]) & set(ours.eos_token_ids)
        text = ours.decode(ids)
        for number, message in enumerate(messages):
            said = f"word{number}x" in text
            has_word = message["content"] or message.get("tool_calls")
            assert said == (number == turn and bool(has_word))
        if FAMILIES[name].thought in messages[turn]:
            assert f"thought{turn + 1}x" in text


U: dict[str, Any] = {"role": "user", "content": "hi"}
RAIN: dict[str, Any] = {"role": "tool", "name": "weather", "content": "rain"}
CALL = " to=functions.weather<|channel|>commentary json<|message|>{}<|call|>"
FINAL = "<|channel|>final<|message|>done.<|return|>"


def thought(text: str) -> str:
    return f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant"


def gpt_oss(*messages: Any) -> list[list[str]]:
    """What is learned of a chat, by sequence."""
    ours, _ = both("gpt-oss")
    found = []
    for sequence in chat_unit(ours, messages, [TOOL]):
        pairs = zip(sequence["loss_mask"], sequence["input_ids"], strict=True)
        runs = groupby(pairs, key=lambda pair: pair[0])
        found.append([ours.decode([i for _, i in run]) for learned, run in runs if learned])
    return found


def asks(**more: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": {}}
    calls = [{"type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": calls, **more}


def answers(**more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "done.", **more}


@pytest.mark.parametrize(
    ("messages", "learned"),
    [
        ([U, asks(thinking="t1"), RAIN, answers()], [[thought("t1") + CALL, FINAL]]),
        ([U, asks(content="t1"), RAIN, answers()], [[thought("t1") + CALL, FINAL]]),
        (
            [U, asks(thinking="t1"), RAIN, asks(thinking="t2"), RAIN, answers(thinking="t3")],
            [[thought("t1") + CALL, thought("t2") + CALL, thought("t3") + FINAL]],
        ),
        (
            [U, asks(thinking="t1"), RAIN, answers(), U, answers()],
            [[thought("t1") + CALL, FINAL], [FINAL]],
        ),
        ([U, asks(), RAIN, answers()], [[CALL, FINAL]]),
    ],
)
def test_gpt_oss_when_it_thinks_before_a_call_then_each_turn_is_learned_as_it_is_served(
    messages: list[dict[str, Any]], learned: list[list[str]]
) -> None:
    assert gpt_oss(*messages) == learned


def test_pair_when_gpt_oss_thinks_before_a_call_then_the_answers_differ_after_its_prompt() -> None:
    ours, _ = both("gpt-oss")
    prompt = [U, asks(thinking="t1"), RAIN]
    row = {"prompt": prompt, "chosen": [answers()], "rejected": [answers(content="no.")]}
    for one, text in zip(pair_unit(ours, row), ("done.", "no."), strict=True):
        ids = one["input_ids"]
        assert ours.decode(ids).startswith(ours.render_chat(prompt, add_generation_prompt=True))
        learned = [i for i, m in zip(ids, one["loss_mask"], strict=True) if m]
        assert ours.decode(learned) == FINAL.replace("done.", text)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        ([U, asks(content="t", thinking="t"), RAIN, answers()], "Cannot pass both content and"),
        ([U, asks(tool_calls=asks()["tool_calls"] * 2), RAIN, answers()], r"tool_calls\[1\]"),
        ([U, answers(content="<|channel|>final<|message|>x")], "containing <|channel|> tags"),
    ],
)
def test_gpt_oss_when_its_template_cannot_show_a_chat_then_refused(
    messages: list[dict[str, Any]], why: str
) -> None:
    with pytest.raises(InvalidInput, match=why.replace("|", r"\|")):
        gpt_oss(*messages)

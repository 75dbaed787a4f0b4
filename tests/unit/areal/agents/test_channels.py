"""The channels of gpt-oss: its thoughts are reasoning, its calls are calls, marks are no text."""

from __future__ import annotations

import json
import random

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
from tests.unit.areal.agents.scripted_model import check_exact
from tests.unit.areal.agents.test_call_forms import FamilyModel

from areal.agents.partial import PartialAnswer
from areal.rewards.code import final_code
from areal.rewards.multiple_choice import multiple_choice_reward
from areal.workflows.answer_text import AnswerText
from areal.workflows.reasoning import THOUGHTS, Parts, split_reasoning
from areal.workflows.rendering import TemplateRenderer
from areal.workflows.tool_text import ToolCall

START, END = "<|start|>assistant", "<|end|>"
THOUGHT = f"<|channel|>analysis<|message|>I think.{END}"
FINAL = "<|channel|>final<|message|>It is 3."
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
PREAMBLE = f"<|channel|>commentary<|message|>I call.{END}"
FUNCTION = {"name": "f", "description": "It is f.", "parameters": {"type": "object"}}
TOOLS = [{"type": "function", "function": FUNCTION}]


def model(*answers: str) -> FamilyModel:
    """Its calls end with <|call|>, and its other answers with <|return|>."""
    scripted = FamilyModel("gpt-oss", *answers)
    ids = scripted.tokenizer.backend.token_to_id
    ends = [ids("<|call|>" if "to=functions" in text else "<|return|>") for text in answers]
    scripted.answers = [[*a[:-1], end] for a, end in zip(scripted.answers, ends, strict=True)]
    return scripted


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (FINAL, Parts("", "It is 3.", False)),
        (THOUGHT + START + FINAL, Parts("I think.", "It is 3.", False)),
        (THOUGHT + START + THOUGHT + START + FINAL, Parts("I think.\nI think.", "It is 3.", False)),
        (THOUGHT[: -len(END)], Parts("I think.", "", True)),
        (THOUGHT + START + THOUGHT[: -len(END)], Parts("I think.\nI think.", "", True)),
        (THOUGHT, Parts("I think.", "", False)),
        (THOUGHT + START + CALL, Parts("I think.", START + CALL, False)),
        (PREAMBLE + START + CALL, Parts("", f"I call.{END}{START}{CALL}", False)),
        ("It is 3.", Parts("", "It is 3.", False)),
    ],
)
def test_answer_when_it_has_channels_then_thoughts_are_reasoning(text: str, parts: Parts) -> None:
    assert split_reasoning(text, False) == parts


@pytest.mark.parametrize(
    ("begun", "rest"),
    [
        ("<think>I ", "think.</think>It is 3."),
        ("[THINK]I ", "think.[/THINK]It is 3."),
        ("<|channel>thoughtI ", "think.<channel|>It is 3."),
        ("<|channel|>analysis<|message|>I ", f"think.{END}{START}{FINAL}"),
        ("<|channel|>analysis<|message|>I ", f"think.{END}{START}{THOUGHT}{START}{FINAL}"),
    ],
)
def test_thought_when_the_answer_was_cut_within_it_then_its_own_tag_ends_it(begun, rest) -> None:
    assert split_reasoning(begun, False).thinking
    found = split_reasoning(rest, True)
    assert (found.content, found.thinking) == ("It is 3.", False)
    assert found.reasoning.startswith("think.")


def test_answer_when_it_thinks_a_hundred_thousand_times_then_it_is_read_in_one_pass() -> None:
    found = split_reasoning((THOUGHT + START) * 100_000 + FINAL, False)
    assert found.reasoning.count("I think.") == 100_000
    assert found.content == "It is 3."


@pytest.mark.parametrize(
    ("family", "ids", "text"),
    [
        ("gpt-oss", f"{THOUGHT}{START}{FINAL}<|return|>", f"{THOUGHT}{START}{FINAL}"),
        ("phi-3.5", "It is 3.<|end|>", "It is 3."),
    ],
)
def test_text_when_tokens_mark_channels_then_it_has_them(family: str, ids: str, text: str) -> None:
    known = FamilyModel(family, "").tokenizer
    assert AnswerText(known).of(known.encode(ids, add_special_tokens=False)) == text


@pytest.mark.parametrize("tag", THOUGHTS)
def test_reward_when_there_is_a_thought_then_only_what_follows_it_counts(tag: str) -> None:
    close = THOUGHTS[tag]
    end = f"{END}{START}<|channel|>final<|message|>" if close == END else close
    draft, code = f"{tag}\nAnswer: A", f"{tag}\n```python\nx = 1\n```"
    assert multiple_choice_reward(f"{draft}{end}B", "B") == 1.0
    assert multiple_choice_reward(f"{draft}{end}No idea.", "A") == 0.0
    assert multiple_choice_reward(draft, "A") == 0.0
    assert final_code(f"{code}{end}```python\nx = 2\n```") == "x = 2\n"
    assert final_code(code) == ""


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize(
    ("said", "text"),
    [
        (THOUGHT + START + CALL, ""),
        (THOUGHT + START + PREAMBLE + START + CALL, "I call."),
        (CALL, ""),
        (THOUGHT + START + ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}', ""),
    ],
)
async def test_call_when_in_a_channel_then_the_agent_reads_and_extends_it(path, said, text) -> None:
    scripted = model(said, THOUGHT + START + FINAL)
    session, first = session_of(scripted), asking(path)
    status, content = await send(session, path, first)
    assert status == 200, content
    found, calls, kept = answer_of(path, content)
    assert (found or "") == text
    assert [(name, arguments) for _, name, arguments in calls] == [("f", {"a": 1})]
    status, content = await send(session, path, continuing(path, first, kept, calls))
    assert status == 200, content
    assert answer_of(path, content)[:2] == ("It is 3.", [])
    check_exact(session.calls, scripted, chains=[[0, 1]])
    prompt = scripted.tokenizer.decode(scripted.requests[1].input_ids)
    result = prompt.partition("<|call|>")[2]
    assert result.startswith("<|start|>functions.f to=assistant<|channel|>commentary<|message|>")
    assert result.endswith(f"{END}{START}")
    assert result.count("<|start|>") == 2  # the result, and the next answer


async def test_answer_when_streamed_then_marks_are_no_text() -> None:
    for said, content, called in (
        (THOUGHT + START + FINAL, "It is 3.", 0),
        (THOUGHT + START + PREAMBLE + START + CALL, "I call.", 1),
    ):
        scripted, path = model(said), "/chat/completions"

        async def step(index: int, end: int) -> None:
            return None

        scripted.step = step
        _, body = await send(session_of(scripted), path, asking(path, stream=True))
        deltas = [each["choices"][0]["delta"] for each in events_of(body)]
        assert "".join(each.get("content") or "" for each in deltas) == content
        assert "".join(each.get("reasoning_content") or "" for each in deltas) == "I think."
        made = [made for each in deltas for made in each.get("tool_calls") or []]
        assert len(made) == called
        assert [strict(each["function"]["arguments"]) for each in made] == [{"a": 1}] * called


@pytest.mark.parametrize("calls", [False, True])
def test_parts_when_streamed_in_any_steps_then_those_of_the_whole_text(calls: bool) -> None:
    known = FamilyModel("gpt-oss", "").tokenizer
    parts = [THOUGHT, START, FINAL, CALL, PREAMBLE, END, " ", "<|channel|>", "analysis", "so\n"]
    chance = random.Random(7)
    for _ in range(400):
        text = "".join(chance.choices(parts, k=chance.randint(1, 6)))
        ids = known.encode(text, add_special_tokens=False)
        partial, told, end = PartialAnswer(known, calls=calls), ["", ""], 0
        while end < len(ids):
            end = min(len(ids), end + chance.randint(1, 5))
            for place, new in enumerate(partial.update(ids[:end])):
                told[place] += new
        reply = TemplateRenderer(known).parse(ids)
        reasoning, content, _ = split_reasoning(reply.text, False)
        assert reasoning.strip().startswith(told[0]), text
        final = (reply.content or "") if calls else content
        assert final.strip().startswith(told[1]), text
        if not calls and text.endswith((FINAL, "so\n")):
            assert [reasoning.strip(), content.strip()] == told, text


def test_message_when_an_answer_opens_another_conversation_then_the_template_shows_it() -> None:
    known = FamilyModel("gpt-oss", "").tokenizer
    renderer = TemplateRenderer(known)
    asked = {"role": "user", "content": "What is f?"}
    said = known.encode(f"{THOUGHT}{START}{FINAL}<|return|>", add_special_tokens=False)
    message = renderer.parse(said).message
    assert message["content"] == "It is 3."
    whole = renderer.render([asked, message], add_generation_prompt=False)
    assert known.decode(whole).endswith(f"{START}{THOUGHT}{START}{FINAL}<|return|>")


def test_result_when_a_tool_gives_it_then_it_follows_the_call_as_in_the_template() -> None:
    known = FamilyModel("gpt-oss", "").tokenizer
    renderer = TemplateRenderer(known)
    asked = [{"role": "user", "content": "What is f?"}]
    history = renderer.render(asked, TOOLS)
    said = known.encode(THOUGHT + START + CALL + "<|call|>", add_special_tokens=False)
    history += said
    result = {"role": "tool", "name": "f", "content": 'a "3"'}
    whole = history + renderer.bridge(history, [result], TOOLS)
    function = {"name": "f", "arguments": {"a": 1}}
    calling = {
        "role": "assistant",
        "thinking": "I think.",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }
    rendered = known.render_chat([*asked, calling, result], tools=TOOLS, add_generation_prompt=True)
    # The model writes the recipient after the channel, and the template before it.
    written = ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}'
    assert known.decode(whole).replace(CALL, written) == rendered
    assert renderer.parse(said, TOOLS).tool_calls == (ToolCall("f", {"a": 1}),)
    assert json.dumps(result["content"]) in rendered

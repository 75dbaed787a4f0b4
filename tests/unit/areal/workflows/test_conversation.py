import subprocess
import sys

import pytest
from tests.unit.areal.workflows.chat_families import FAMILIES, tokenizer

from areal.errors import InvalidInput, WorkflowError
from areal.tokenizer import Tokenizer
from areal.types import LLMResponse, StopReason
from areal.workflows.conversation import Conversation
from areal.workflows.rendering import TemplateRenderer
from areal.workflows.tool_text import ToolCall
from areal_torch.models.tiny import ASSISTANT_ID, END_ID, USER_ID, make_byte_tokenizer
from areal_torch.models.tiny import CHAT_TEMPLATE as TEMPLATE

ASK = [{"role": "user", "content": "1+1="}]
AGAIN = {"role": "user", "content": "no"}
RESULT = {"role": "tool", "name": "add", "tool_call_id": "call12345", "content": "46"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {}},
    },
}


def tiny(template=TEMPLATE):
    return Tokenizer(make_byte_tokenizer(), chat_template=template, eos_token_ids=[END_ID])


def answered(prompt, *output, stop=StopReason.STOP):
    return LLMResponse(list(prompt), list(output), [-0.5] * len(output), [3] * len(output), stop)


def bridge_text(family, answer, *messages, tools=None, **variables):
    """The text between an answer (given as text) and the next one."""
    tok = tokenizer(family)
    renderer = TemplateRenderer(tok, **variables)
    history = [1, *tok.encode(answer, add_special_tokens=False)]
    return tok.decode(renderer.bridge(history, messages, tools))


QWEN = "\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n"
LLAMA = (
    "<|start_header_id|>user<|end_header_id|>\n\nno<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)


@pytest.mark.parametrize(
    ("family", "answer", "bridge"),
    [
        ("qwen2.5", "2", f"<|im_end|>{QWEN}"),  # cut
        ("qwen2.5", "2<|im_end|>", QWEN),
        ("qwen2.5", "2<|endoftext|>", QWEN),  # ended otherwise
        ("qwen2.5", "<|im_end|>2", f"<|im_end|>{QWEN}"),  # an end sampled in the middle is none
        ("qwen3", "<think>\nhm\n</think>\n\n2<|im_end|>", QWEN),
        ("qwen3", "<think>\nhm", f"<|im_end|>{QWEN}"),
        ("llama-3.1", "2", f"<|eot_id|>{LLAMA}"),
        ("llama-3.1", "2<|eot_id|>", LLAMA),
        ("llama-3.1", "2<|eom_id|>", LLAMA),
        ("glm-4.6", "2", "<|user|>\nno<|assistant|>"),
        ("glm-4.6", "2<|user|>", "\nno<|assistant|>"),  # its end is the next turn's first token
        ("glm-4.6", "2<|endoftext|>", "<|user|>\nno<|assistant|>"),
        ("minimax-m2", "2[e~[", "\n]~b]user\nno[e~[\n]~b]ai\n<think>\n"),
    ],
)
def test_bridge_when_an_answer_was_cut_or_ended_then_its_end_is_there_once(family, answer, bridge):
    assert bridge_text(family, answer, AGAIN) == bridge


@pytest.mark.parametrize(
    ("family", "answer", "bridge"),
    [
        (
            "qwen3",
            "<tool_call>x</tool_call><|im_end|>",
            "\n<|im_start|>user\n<tool_response>\n46\n</tool_response>\n<tool_response>\n46\n"
            "</tool_response><|im_end|>\n<|im_start|>assistant\n",
        ),
        (
            "llama-3.1",
            "<|python_tag|>x<|eom_id|>",
            '<|start_header_id|>ipython<|end_header_id|>\n\n"46"<|eot_id|>'
            '<|start_header_id|>ipython<|end_header_id|>\n\n"46"<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        (
            "glm-4.6",
            "<tool_call>x</tool_call><|observation|>",
            "\n<tool_response>\n46\n</tool_response>\n<tool_response>\n46\n</tool_response>"
            "<|assistant|>",
        ),
        (
            "minimax-m2",
            "x",
            "[e~[\n]~b]tool\n<response>46</response>\n<response>46</response>[e~[\n]~b]ai\n<think>\n",
        ),
    ],
)
def test_bridge_when_tools_answered_then_their_results_follow(family, answer, bridge):
    assert bridge_text(family, answer, RESULT, RESULT, tools=[ADD]) == bridge


def test_bridge_when_thinking_is_off_then_the_header_says_so_and_keeps_it():
    tok = tokenizer("qwen3")
    chat = Conversation(TemplateRenderer(tok, enable_thinking=False), ASK)
    prompt = chat.input_ids
    chat.add_response(answered(prompt, *tok.encode("2")))
    chat.add_messages(AGAIN)
    text = tok.decode(chat.input_ids)
    assert text.count("<|im_start|>assistant\n<think>\n\n</think>\n\n") == 2
    assert chat.input_ids[: len(prompt)] == prompt


def test_conversation_when_two_turns_then_the_trajectory_holds_them_as_sampled():
    chat = Conversation(tiny(), ASK)
    prompt = [USER_ID, *b"1+1=", ASSISTANT_ID]
    assert chat.input_ids == prompt
    # The middle token is a special one: as text it would be a user's turn.
    reply = chat.add_response(answered(prompt, *b"3", USER_ID, *b"4", stop=StopReason.LENGTH))
    assert reply.text == "34"
    chat.add_messages(AGAIN)
    second = [*prompt, *b"3", USER_ID, *b"4", END_ID, USER_ID, *b"no", ASSISTANT_ID]
    assert chat.input_ids == second
    assert chat.add_response(answered(second, *b"2", END_ID)).text == "2"
    t = chat.trajectory([0.25, 1.0])
    assert t.input_ids.tolist() == [*second, *b"2", END_ID]
    sampled = [6, 7, 8, 14, 15]
    assert [i for i, on in enumerate(t.loss_mask) if on] == sampled
    assert [i for i, v in enumerate(t.token_versions) if v == 3] == sampled
    assert {i: r for i, r in enumerate(t.rewards) if r} == {8: 0.25, 15: 1.0}
    assert (t.completion_text, t.finish_reason) == ("2", StopReason.STOP)
    assert chat.messages == [
        *ASK,
        {"role": "assistant", "content": "34"},
        AGAIN,
        {"role": "assistant", "content": "2"},
    ]


def test_conversation_when_an_answer_is_continued_then_nothing_stands_between():
    chat = Conversation(tiny(), ASK)
    chat.add_response(answered(chat.input_ids, *b"1", stop=StopReason.LENGTH))
    chat.add_response(answered(chat.input_ids, *b"2", END_ID))
    assert chat.trajectory(1.0).input_ids.tolist() == [
        USER_ID, *b"1+1=", ASSISTANT_ID, *b"12", END_ID,
    ]  # fmt: skip


def test_conversation_when_messages_follow_the_last_answer_then_they_are_not_trained_on():
    chat = Conversation(tiny(), ASK)
    chat.add_response(answered(chat.input_ids, *b"3", END_ID))
    chat.add_messages(AGAIN)
    assert chat.trajectory(0.0).input_ids.tolist()[-2:] == [*b"3", END_ID]


def test_conversation_when_answered_for_other_ids_then_refused():
    chat = Conversation(tiny(), ASK)
    with pytest.raises(WorkflowError, match="answer 0 was sampled for ids other than input_ids"):
        chat.add_response(answered([USER_ID, *b"1+2=", ASSISTANT_ID], *b"3"))
    with pytest.raises(WorkflowError, match="no token was sampled"):
        chat.trajectory(1.0)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "expected at least one"),
        ([{"role": "assistant", "content": "2"}], r"messages\[0\]: role 'assistant'"),
        ([AGAIN, "no"], r"messages\[1\]: expected an object with 'role' .* got str"),
        ([[AGAIN]], r"messages\[0\]: expected an object .* got list"),
    ],
)
def test_conversation_when_a_message_is_wrong_then_names_it_and_keeps_what_it_has(
    messages, message
):
    chat = Conversation(tiny(), ASK)
    chat.add_response(answered(chat.input_ids, *b"3", END_ID))
    before = chat.input_ids
    with pytest.raises(InvalidInput, match=message):
        chat.add_messages(*messages)
    assert (chat.input_ids, len(chat.messages)) == (before, 2)


ONLY_THE_LAST = "{{ messages[-1]['content'] }}<|assistant|>"
NO_TOOLS = TEMPLATE.replace("{{ '<|'", "{% if message['role'] != 'tool' %}{{ '<|'").replace(
    "{% if message['role'] == 'assistant' %}",
    "{% endif %}{% if message['role'] == 'assistant' %}",
)


def test_conversation_when_the_template_drops_answers_then_refused_before_the_first_one():
    with pytest.raises(InvalidInput, match="leaves out the model's answer: turns cannot be app"):
        Conversation(tiny(ONLY_THE_LAST), ASK)
    with pytest.raises(InvalidInput, match="no chat template"):
        Conversation(tiny(None), ASK)


def test_conversation_when_the_template_drops_tool_results_then_refused():
    chat = Conversation(tiny(NO_TOOLS), ASK)
    chat.add_response(answered(chat.input_ids, *b"3", END_ID))
    with pytest.raises(InvalidInput, match="leaves out a message of role 'tool'"):
        chat.add_messages(RESULT)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_conversation_when_tools_are_offered_then_the_opening_shows_them(family):
    tok = tokenizer(family)
    chat = Conversation(tok, ASK, tools=[ADD])
    assert chat.input_ids == tok.apply_chat_template(ASK, tools=[ADD])
    assert '"description": "Adds."' in tok.decode(chat.input_ids)


@pytest.mark.parametrize(
    ("family", "text", "calls"),
    [
        ("qwen3", "12", []),
        ("qwen3", '<tool_call>\n{"name": "add", "arguments": {"a": {"b": 1}}}\n</tool_call>',
         [ToolCall("add", {"a": {"b": 1}})]),
        ("qwen2.5", '<tool_call>{"name": "f", "arguments": {}}</tool_call>\n'
         '<tool_call>{"name": "g", "arguments": {}}</tool_call><|im_end|>',
         [ToolCall("f", {}), ToolCall("g", {})]),
        ("qwen2.5", '<tool_call>{"name": "f", "arg</tool_call>', []),
        ("qwen2.5", '{"a": 1}', []),
        ("llama-3.1", '<|python_tag|>{"name": "add", "parameters": {"a": 1}}<|eom_id|>',
         [ToolCall("add", {"a": 1})]),
    ],
)  # fmt: skip
def test_reply_when_it_has_tool_calls_then_they_are_read(family, text, calls):
    tok = tokenizer(family)
    reply = TemplateRenderer(tok).parse(tok.encode(text))
    assert list(reply.tool_calls) == calls
    assert "<|" not in reply.text
    assert len(reply.message.get("tool_calls", [])) == len(calls)


def test_conversation_when_imported_from_the_library_then_no_torch_is_loaded():
    code = "import sys; from areal import Conversation; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

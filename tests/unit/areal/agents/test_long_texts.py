"""Long texts are refused before work is done on them, and large ones are handled in threads."""

from __future__ import annotations

import re
import threading

import pytest
from tests.unit.areal.agents.raw_calls import APIS, asking, send, session_of, strict
from tests.unit.areal.agents.scripted_model import Scripted
from tests.unit.areal.workflows.chat_families import tokenizer

from areal.agents.headers import Repeats
from areal.errors import PromptTooLong
from areal.tokenizer import Tokenizer
from areal.workflows.conversation import Conversation
from areal.workflows.large_text import LARGE, apart, size_of
from areal.workflows.rendering import TemplateRenderer

MEGABYTE = "All work and no play. " * 50_000


class Watched(Tokenizer):
    """Counts the characters that it encodes and renders, and the threads in which it does."""

    def __init__(self, family="qwen2.5", longest=None):
        plain = tokenizer(family)
        super().__init__(
            plain.backend,
            chat_template=plain.chat_template,
            special_tokens=plain.special_tokens,
            eos_token_ids=plain.eos_token_ids,
            longest=longest,
        )
        self.encoded, self.rendered, self.threads, self.rendered_in = 0, 0, set(), set()

    def encode(self, text, *, add_special_tokens=True):
        self.encoded += len(text)
        if len(text) > LARGE:
            self.threads.add(threading.get_ident())
        return super().encode(text, add_special_tokens=add_special_tokens)

    def render_chat(self, messages, **more):
        text = super().render_chat(messages, **more)
        self.rendered += len(text)
        self.rendered_in.add(threading.get_ident())
        if len(text) > LARGE:
            self.threads.add(threading.get_ident())
        return text


def watched_session(context_length):
    scripted = Scripted("fine")
    scripted.tokenizer = Watched()
    return session_of(scripted, context_length), scripted.tokenizer, scripted


def with_text(path, text, role="user"):
    body = asking(path)
    body["input" if path == "/responses" else "messages"][0] |= {"role": role, "content": text}
    return body


@pytest.mark.parametrize("path", APIS)
async def test_message_when_it_cannot_fit_then_refused_before_template_and_tokenizer(path):
    session, watched, scripted = watched_session(2048)
    status, content = await send(session, path, with_text(path, MEGABYTE * 20))
    assert status == 400
    told = re.findall(r"\d+", strict(content)["error"]["message"])
    assert sorted(map(int, told))[0] == 2048
    assert 2048 < int(max(told, key=int)) <= len(MEGABYTE * 20)
    assert (watched.rendered, watched.encoded, scripted.requests) == (0, 0, [])
    assert session.calls.merged  # nothing was recorded
    assert await session.calls.begin([1], 1, Repeats()) == 0


async def test_message_when_its_length_alone_does_not_tell_then_a_beginning_is_encoded():
    session, watched, _ = watched_session(100_000)
    text = MEGABYTE[:1_000_000]
    status, content = await send(session, "/messages", with_text("/messages", text))
    assert status == 400
    assert "tokens > 100000 maximum" in strict(content)["error"]["message"]
    assert watched.rendered == 0
    assert watched.encoded <= 200_000


async def test_messages_when_many_then_they_count_together():
    session, watched, _ = watched_session(2048)
    body = {"messages": [{"role": "user", "content": "x" * 1000}] * 1000}
    status, _ = await send(session, "/chat/completions", body)
    assert (status, watched.rendered) == (400, 0)


async def test_message_when_large_and_fitting_then_rendered_and_encoded_in_threads():
    session, watched, scripted = watched_session(1_000_000)
    text = MEGABYTE[: 2 * LARGE]
    status, content = await send(session, "/chat/completions", with_text("/chat/completions", text))
    assert status == 200, content
    assert len(scripted.requests[0].input_ids) > LARGE
    assert watched.threads
    assert threading.get_ident() not in watched.threads


@pytest.mark.parametrize("path", ["/messages", "/messages/count_tokens", "/chat/completions"])
async def test_prefill_when_it_cannot_fit_then_refused_before_template_and_tokenizer(path):
    session, watched, scripted = watched_session(2048)
    scripted.tokenizer.longest = 2048
    body = asking(path)
    body["messages"].append({"role": "assistant", "content": MEGABYTE})
    if path == "/chat/completions":
        body["continue_final_message"] = True
    status, _ = await send(session, path, body)
    assert (status, watched.rendered, watched.encoded) == (400, 0, 0)
    assert scripted.requests == []


@pytest.mark.parametrize("part", ["tools", "chat_template_kwargs", "begun"])
async def test_request_when_any_part_of_it_is_large_then_rendered_in_a_thread(part):
    session, watched, _ = watched_session(1_000_000)
    text, body = MEGABYTE[: 2 * LARGE], asking("/chat/completions")
    if part == "tools":
        body["tools"] = [{"type": "function", "function": {"name": "f", "description": text}}]
    elif part == "begun":
        body["messages"].append({"role": "assistant", "content": text, "prefix": True})
    else:
        body["chat_template_kwargs"] = {"system_message": text}
    status, content = await send(session, "/chat/completions", body)
    assert status == 200, content
    assert threading.get_ident() not in watched.threads
    assert watched.rendered_in - {threading.get_ident()}


@pytest.mark.parametrize("prompt", ["x" * 50_000, [1] * 2048])
async def test_completion_when_the_prompt_cannot_fit_then_refused_and_not_recorded(prompt):
    session, _, scripted = watched_session(2048)
    status, _ = await send(session, "/completions", {"prompt": prompt})
    assert status == 400
    assert scripted.requests == []
    assert await session.calls.begin([1], 1, Repeats()) == 0


@pytest.mark.parametrize("bad", [-1, 2**31, 10**30])
async def test_completion_when_an_id_is_of_no_token_then_refused_and_not_recorded(bad):
    session, _, scripted = watched_session(2048)
    status, content = await send(session, "/completions", {"prompt": [1, bad]})
    assert status == 400
    assert str(bad) in strict(content)["error"]["message"]
    assert scripted.requests == []
    assert await session.calls.begin([1], 1, Repeats()) == 0


def test_texts_when_they_are_as_long_as_the_context_then_not_refused():
    plain = tokenizer("qwen2.5")
    for text in (MEGABYTE[:30_000], "数学" * 5_000, "<|im_start|>" * 5_000, " " * 30_000):
        tokens = len(plain.encode(text, add_special_tokens=False))
        plain.refuse_longer([text], tokens)
        plain.refuse_longer([text[: len(text) // 2], text[len(text) // 2 :]], tokens)
        with pytest.raises(PromptTooLong):
            plain.refuse_longer([text], tokens // 2)


def test_conversation_when_a_result_cannot_fit_then_refused_before_the_template():
    watched = Watched(longest=2048)
    chat = Conversation(TemplateRenderer(watched), [{"role": "user", "content": "?"}])
    rendered = watched.rendered
    with pytest.raises(PromptTooLong):
        chat.add_messages({"role": "user", "content": MEGABYTE})
    assert watched.rendered == rendered


async def test_work_when_large_then_in_a_thread_else_here():
    here = threading.get_ident()
    assert await apart(LARGE - 1, threading.get_ident) == here
    assert await apart(LARGE, threading.get_ident) != here


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ({"content": "abc"}, 3),
        ({"content": [{"type": "text", "text": "abc"}, {"type": "image"}, 7]}, 3),
        ({"content": None, "tool_calls": [{"function": {"arguments": {"a": ["bc", 1]}}}]}, 2),
        ({"tool_calls": [{"function": {"arguments": "abc"}}, 1, {"function": 2}]}, 3),
        ({"tool_calls": "abc"}, 0),
        (7, 0),
    ],
)
def test_size_when_of_any_message_then_its_characters(message, size):
    assert size_of([message]) == size


def test_text_when_it_has_half_a_character_then_it_is_read_as_unknown():
    plain = tokenizer("qwen2.5")
    assert plain.encode("a\udcffb\ud83d\ude00") == plain.encode("a\ufffdb😀")


def test_text_when_large_then_the_same_ids_as_in_parts():
    plain = tokenizer("qwen2.5")
    text = "A line, été 数学.\n" * 3000
    part = plain.encode(text[: len(text) // 3000], add_special_tokens=False)
    assert plain.encode(text, add_special_tokens=False) == part * 3000
    assert plain.encode(text + "\udcff")[-3:] == plain.encode("\ufffd")[-3:]

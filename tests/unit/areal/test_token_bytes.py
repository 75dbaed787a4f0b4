"""The bytes of tokens join to the text, also where a character is several tokens."""

from __future__ import annotations

import random

import pytest
from tests.unit.areal.agents.raw_calls import asking, send, session_of, strict
from tests.unit.areal.agents.scripted_model import Scripted
from tests.unit.areal.agents.test_partial import sentencepiece
from tests.unit.areal.workflows.chat_families import tokenizer

from areal.tokenizer.token_bytes import token_bytes

TEXT = "héllo 😀 数学, 한국 🎉€ ответ  the a b"
MODELS = ["qwen2.5", "llama-3.1", "glm-4.6", "sentencepiece"]


def model_of(name: str):
    return sentencepiece() if name == "sentencepiece" else tokenizer(name)


@pytest.mark.parametrize("name", MODELS)
def test_bytes_when_joined_then_the_text(name):
    model = model_of(name)
    ids = model.encode(TEXT, add_special_tokens=False)
    assert any("\N{REPLACEMENT CHARACTER}" in model.decode([each]) for each in ids)
    assert b"".join(token_bytes(model, ids)) == model.decode(ids).encode()


@pytest.mark.parametrize("name", MODELS)
def test_bytes_when_the_ids_are_random_then_read_as_the_decoder_reads_them(name):
    model, chance = model_of(name), random.Random(name)
    for _ in range(200):
        ids = [chance.randrange(model.vocab_size) for _ in range(chance.randint(1, 8))]
        text = model.decode(ids)
        joined = b"".join(token_bytes(model, ids))
        if "\N{REPLACEMENT CHARACTER}" not in text:
            assert joined == text.encode(), ids


@pytest.mark.parametrize("path", ["/chat/completions", "/responses"])
@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs_when_requested_then_their_bytes_join_to_the_text(path, stream):
    scripted = Scripted(TEXT)
    more = {"logprobs": True} if path != "/responses" else {}
    more |= {"include": ["message.output_text.logprobs"]} if path == "/responses" else {}
    _, content = await send(session_of(scripted), path, asking(path, stream=stream, **more))
    if stream:
        lines = [line[6:] for line in content.split(b"\n") if line.startswith(b"data: {")]
        bodies = [strict(line) for line in lines]
    else:
        bodies = [strict(content)]
    found = max((list(logprobs(body)) for body in bodies), key=len)
    joined = b"".join(bytes(each["bytes"]) for each in found)
    assert joined.decode() == TEXT + "<|im_end|>"


def logprobs(value):
    """The objects with bytes in a JSON value, in order."""
    if isinstance(value, dict):
        if "bytes" in value:
            yield value
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from logprobs(each)

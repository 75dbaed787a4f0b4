"""What is streamed of an unfinished answer is what the whole text so far says, at a steady cost."""

from __future__ import annotations

import random

import pytest
import tokenizers
from tests.unit.areal.workflows.chat_families import tokenizer

from areal.agents.partial import PartialAnswer, _without_start_of
from areal.tokenizer import Tokenizer
from areal.workflows.reasoning import THOUGHTS, closes_of, opening_of, split_reasoning
from areal.workflows.tool_text import MARKS

FAMILIES = ["qwen2.5", "qwen3", "llama-3.1", "glm-4.6"]
PIECES = [
    "I add, été 1 < 2.\n",
    "<think>\n12 < 34 数学\n",
    "</think>\n\n46 😀",
    '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
    '{"name": "add"}',
    " <tool",
    "  \n",
    "Größe STOP more",
    "ST",
]


def sentencepiece() -> Tokenizer:
    """Strips the blank of the first token, and writes unknown characters as bytes."""
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁a", "b", "c"]
    model = tokenizers.models.BPE(
        {token: number for number, token in enumerate(vocabulary)}, [], byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    of = tokenizers.decoders
    backend.decoder = of.Sequence(
        [of.Replace("▁", " "), of.ByteFallback(), of.Fuse(), of.Strip(" ", 1, 0)]
    )
    return Tokenizer(backend)


class Whole:
    """The slow reference: decodes all ids at each step and splits the whole text."""

    def __init__(self, tokenizer, stop=(), *, opened=False, calls=False, plain=False):
        self.tokenizer, self.stop = tokenizer, stop
        self.opened, self.calls, self.plain = opened, calls, plain
        self.reasoning = self.content = self.text = ""

    def update(self, ids):
        """False: characters that were complete have changed, and no stream could follow."""
        text = self.tokenizer.decode(ids, skip_special_tokens=True).rstrip("\ufffd")
        if not text.startswith(self.text):
            return False
        self.text = text
        ends = [text.index(each) for each in self.stop if each in text]
        text = text[: min(ends)] if ends else _without_start_of(text, self.stop)
        reasoning, content = ("", text) if self.plain else self.split(text)
        if reasoning.startswith(self.reasoning):
            self.reasoning = reasoning
        if content.startswith(self.content):
            self.content = content
        return True

    def split(self, text):
        bare = text.lstrip()
        if any(tag.startswith(bare) and tag != bare for tag in THOUGHTS):
            return "", ""
        reasoning, content, _ = split_reasoning(text, self.opened)
        tag = opening_of(bare, self.opened)
        closes = () if tag is None else closes_of(tag)
        if not any(close in text for close in closes):
            reasoning = _without_start_of(reasoning, closes)
        if self.calls:
            bare_call = content.lstrip().startswith("{")
            ends = [content.index(mark) for mark in MARKS if mark in content]
            content = content[: min(ends)] if ends else _without_start_of(content, MARKS)
            if bare_call:
                content = ""
        return reasoning.strip(), content.strip()


def random_ids(tokenizer: Tokenizer, chance: random.Random) -> list[int]:
    """Pieces that mean something, among ids that mean nothing: mostly parts of characters."""
    ids: list[int] = []
    for _ in range(chance.randint(1, 8)):
        if chance.random() < 0.6:
            ids += tokenizer.encode(chance.choice(PIECES), add_special_tokens=False)
        else:
            ids += [chance.randrange(tokenizer.vocab_size) for _ in range(chance.randint(1, 6))]
    return ids


@pytest.mark.parametrize("family", [*FAMILIES, "sentencepiece"])
def test_parts_when_streamed_in_any_steps_then_those_of_the_whole_text(family):
    model = sentencepiece() if family == "sentencepiece" else tokenizer(family)
    chance = random.Random(family)
    for _ in range(300):
        ids = random_ids(model, chance)
        options = {name: chance.random() < 0.4 for name in ("opened", "calls", "plain")}
        stop = chance.choice([(), ("STOP",), ("STOP", "TO")])
        partial = PartialAnswer(model, stop, **options)
        whole, told, end = Whole(model, stop, **options), ["", ""], 0
        while end < len(ids):
            end = min(len(ids), end + chance.randint(1, 5))
            if not whole.update(ids[:end]):
                break
            for place, text in enumerate(partial.update(ids[:end])):
                told[place] += text
            expected = [whole.reasoning, whole.content]
            assert told == expected == [partial.reasoning, partial.content], (ids[:end], options)
            assert partial.agrees_with(ids[:end])
        assert not partial.agrees_with([-1, *ids[1:]])


class Counted(Tokenizer):
    """Counts the ids that it decodes."""

    decoded = 0

    def decode(self, ids, *, skip_special_tokens=False):
        self.decoded += len(ids)
        return super().decode(ids, skip_special_tokens=skip_special_tokens)


def test_long_answer_when_streamed_then_each_id_is_decoded_a_few_times():
    plain = tokenizer("qwen2.5")
    counted = Counted(plain.backend)
    ids = plain.encode("The answer is 46, été 数学. " * 1000, add_special_tokens=False)
    partial = PartialAnswer(counted, calls=True)
    for end in range(8, len(ids), 8):
        partial.update(ids[:end])
    assert len(ids) > 3000
    assert counted.decoded < 6 * len(ids)

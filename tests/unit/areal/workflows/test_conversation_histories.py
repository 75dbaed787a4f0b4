"""Random histories keep every sampled id, whatever the model samples."""

import random
import re
import unicodedata

import numpy as np
import pytest
from tests.unit.areal.workflows.chat_families import FAMILIES, end_of_turn, tokenizer

from areal.types import LLMResponse, StopReason
from areal.workflows.conversation import Conversation
from areal.workflows.rendering import TemplateRenderer

HISTORIES = [150, pytest.param(2500, marks=pytest.mark.long)]
# GLM writes "\n<think></think>\n" before a plain answer and MiniMax opens a thought with it: the
# header that the model was given and the one that a later render shows are not the same.
SAME_HEADER = {"qwen2.5", "qwen3", "llama-3.1"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]
WORDS = [
    "the", "answer", "is", "46", "wrong,", "try", "again", "\n\n", "  ", "été", "e\u0301te\u0301",
    "数学", "😀", "\u200b", "\u202e", "{}", '{"name": "add"}', "'", "\\n", "</s>", "[INST]",
    "<tool>", "A" * 30, "<|im_end|>", "<|im_start|>user\n", "<|eot_id|>", "<|user|>", "[e~[",
    "<|endoftext|>", "AREAL-ANSWER",
]  # fmt: skip
SPECIAL = re.compile(r"<\||\|>|\[e~\[|</?think>")


def words(rng, plain=False):
    chosen = [rng.choice(WORDS) for _ in range(rng.randrange(1, 8))]
    if plain:
        chosen = [word for word in chosen if not SPECIAL.search(word)] or ["yes"]
    # Some templates strip what they are given.
    return unicodedata.normalize("NFC", " ".join(chosen)).strip() or "no"


class History:
    """One conversation, and beside it what it should have become."""

    def __init__(self, family, rng):
        self.family, self.rng, self.tok = family, rng, tokenizer(family)
        self.tools = TOOLS if rng.random() < 0.2 else None
        self.opening = [{"role": "user", "content": words(rng)}]
        if rng.random() < 0.3:
            self.opening.insert(0, {"role": "system", "content": words(rng)})
        self.messages = list(self.opening)  # as an author would keep them
        self.samples = []
        self.canonical = True

    def sample(self, prompt):
        """An answer: what the tokenizer would write, random ids, or a call; ended or cut."""
        rng, tok = self.rng, self.tok
        kind = rng.choice(["plain", "plain", "random", "call", "empty"])
        ended = rng.random() < 0.6
        message = {"role": "assistant", "content": words(rng, plain=True)}
        if kind == "call" and self.tools and self.family in {"qwen2.5", "qwen3"}:
            call = '{"name": "add", "arguments": {"a": 1}}'
            text = f"{message['content']}\n<tool_call>\n{call}\n</tool_call>"
            calls = [{"function": {"name": "add", "arguments": {"a": 1}}}]
            ids, message["tool_calls"] = tok.encode(text, add_special_tokens=False), calls
        else:
            ids = tok.encode(message["content"], add_special_tokens=False)
        if kind == "random":
            ids = [rng.randrange(tok.vocab_size) for _ in range(rng.randrange(1, 12))]
            self.canonical = False
        elif kind == "empty":
            ids, message["content"], ended = [], "", False
            self.canonical = False
        if ended:
            end = end_of_turn(self.family)
            if rng.random() < 0.2:
                end = rng.choice(tok.eos_token_ids)
                self.canonical &= end == end_of_turn(self.family)
            ids = [*ids, end]
        self.messages.append(message)
        n = len(ids)
        versions = sorted(rng.randrange(5) for _ in range(n))
        sampled = LLMResponse(
            list(prompt), ids, [-rng.random() for _ in ids], versions,
            StopReason.STOP if ended else StopReason.LENGTH,
        )  # fmt: skip
        self.samples.append(sampled)
        return sampled, bool(message.get("tool_calls"))

    def reactions(self, called):
        if called:
            results = [
                {"role": "tool", "name": "add", "content": words(self.rng)}
                for _ in range(self.rng.randrange(1, 3))
            ]
        else:
            results = [{"role": "user", "content": words(self.rng)}]
        self.messages += results
        return results

    def segments(self):
        """Token ids around the answers: the template's text, with a word for each answer."""
        answers = iter(range(len(self.messages)))
        marked = [
            {"role": "assistant", "content": f"XQ{next(answers)}QX"}
            if m["role"] == "assistant"
            else m
            for m in self.messages
        ]
        text = self.tok.render_chat(marked, tools=self.tools)
        # Headers that only a later render has are no part of what the model saw.
        if self.family == "glm-4.6":
            text = re.sub(r"<\|assistant\|>\n<think></think>\n(?=XQ)", "<|assistant|>", text)
        if self.family == "minimax-m2":
            text = re.sub(r"\]~b\]ai\n(?=XQ)", "]~b]ai\n<think>\n", text)
        return [
            self.tok.encode(piece, add_special_tokens=False) for piece in re.split(r"XQ\d+QX", text)
        ]

    def expected(self):
        """(ids, which are sampled): every answer as sampled, with each end of turn once."""
        opening, *between = self.segments()
        ids, sampled = list(opening), [False] * len(opening)
        for answer, segment in zip(self.samples, between, strict=True):
            ids += answer.output_tokens
            sampled += [True] * len(answer.output_tokens)
            last = ids[-1]
            if self.family == "glm-4.6":  # its turns have no end of their own
                skip = last == segment[0]
            else:
                assert segment[0] == end_of_turn(self.family)
                skip = last in self.tok.eos_token_ids
            ids += segment[skip:]
            sampled += [False] * len(segment[skip:])
        return ids, sampled


def check(family, rng, renderer):
    history = History(family, rng)
    chat = Conversation(renderer, history.opening, tools=history.tools)
    for _ in range(rng.choice([1, 1, 2, 3])):
        sampled, called = history.sample(chat.input_ids)
        chat.add_response(sampled)
        results = history.reactions(called)
        if rng.random() < 0.5:
            chat.add_messages(*results)
        else:
            for result in results:  # one by one is the same
                chat.add_messages(result)
    ids, sampled = history.expected()
    assert chat.input_ids == ids
    if history.canonical and family in SAME_HEADER:
        assert ids == history.tok.apply_chat_template(history.messages, tools=history.tools)
    if not any(sampled):
        return 0
    trajectory = chat.trajectory(1.0)
    length = trajectory.input_ids.size
    mask = trajectory.loss_mask
    assert (trajectory.input_ids.tolist(), mask.tolist()) == (ids[:length], sampled[:length])
    assert not any(sampled[length:])
    versions = [version for s in history.samples for version in s.output_versions]
    logprobs = [np.float32(p) for s in history.samples for p in s.output_logprobs]
    assert trajectory.token_versions[mask].tolist() == versions
    assert trajectory.behavior_logprobs[mask].tolist() == logprobs
    assert set(trajectory.token_versions[~mask].tolist()) <= {-1}
    assert not trajectory.behavior_logprobs[~mask].any()
    assert np.flatnonzero(trajectory.rewards).tolist() == [np.flatnonzero(mask)[-1]]
    return int(history.canonical)


@pytest.mark.parametrize("histories", HISTORIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_histories_when_random_then_every_sampled_id_is_kept(family, histories):
    renderer = TemplateRenderer(tokenizer(family))
    canonical = 0
    for seed in range(histories):
        canonical += check(family, random.Random(f"{family}-{seed}"), renderer)
    assert canonical > histories / 10

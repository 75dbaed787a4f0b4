"""Random agents on the chat route: calls merge or branch exactly as a slow reference says.

`AREAL_HISTORIES=10000` tries so many for each chat template, in place of a few hundred.
"""

from __future__ import annotations

import asyncio
import os
import random

import orjson
import pytest
from tests.unit.areal.agents.ledger_in_memory import LedgerInMemory
from tests.unit.areal.agents.slow_reference import Transcript, merged
from tests.unit.areal.workflows.chat_families import end_of_turn, tokenizer
from tests.unit.areal.workflows.test_conversation_histories import TOOLS, words

from areal.agents.calls import Calls
from areal.agents.routes import handle
from areal.agents.session import Model, Session
from areal.agents.tree import Call, merge
from areal.errors import Unavailable
from areal.types import GenerationHyperparameters, LLMResponse, StopReason
from areal.workflows.rendering import TemplateRenderer

HISTORIES = int(os.environ.get("AREAL_HISTORIES", "150"))
FAMILIES = ["qwen2.5", "qwen3", "llama-3.1", "glm-4.6"]
CALLS = {
    "llama-3.1": '{"name": "add", "parameters": {"a": %d}}',
    "glm-4.6": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>%d</arg_value>\n</tool_call>",
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": %d}}\n</tool_call>'
STEPS = (
    ["turn"] * 7
    + ["samples", "samples", "again", "retry", "retry", "late", "fail", "compact"]
    + ["sub-agent", "back", "edit", "edit", "tools"]
)


class RandomModel:
    """Samples text, thoughts, calls or any ids; ended or cut; rarely the same twice."""

    def __init__(self, family: str, rng: random.Random) -> None:
        self.family, self.rng, self.tok = family, rng, tokenizer(family)
        self.failing = False
        self.prompts: list[list[int]] = []
        self.sampled: list[LLMResponse] = []

    async def generate(self, request):
        self.prompts.append(request.input_ids)
        if self.failing:
            raise Unavailable("no server")
        made = [self._one(request.input_ids) for _ in range(request.gconfig.n_samples)]
        self.sampled += made
        return made

    def _one(self, prompt) -> LLMResponse:
        rng, tok = self.rng, self.tok
        kind = rng.choice(["plain", "plain", "thought", "call", "call", "random", "short"])
        if kind == "random":
            ids = [rng.randrange(tok.vocab_size) for _ in range(rng.randrange(1, 12))]
        else:
            text = words(rng, plain=True) if kind != "short" else "yes"
            if kind == "call":
                call = CALLS.get(self.family, CALL)
                text = (
                    call if self.family == "llama-3.1" else f"{text}\n{call * rng.choice([1, 2])}"
                )
            elif kind == "thought":
                text = f"<think>\n{words(rng, plain=True)}\n</think>\n\n{text}"
            ids = tok.encode(text, add_special_tokens=False)
        ended = rng.random() < 0.8
        if ended:
            common = rng.random() < 0.8
            ids = [*ids, end_of_turn(self.family) if common else rng.choice(tok.eos_token_ids)]
        count = len(ids)
        logprobs, stop = [-rng.random() for _ in ids], StopReason.STOP
        return LLMResponse(
            list(prompt), ids, logprobs, [rng.randrange(5)] * count,
            stop if ended else StopReason.LENGTH,
        )  # fmt: skip


class Agent:
    """Speaks OpenAI's chat with a session, and notes what should come of it."""

    def __init__(self, family: str, rng: random.Random) -> None:
        self.rng, self.model = rng, RandomModel(family, rng)
        self.transcript = Transcript(family)
        self.ledger = LedgerInMemory() if rng.random() < 0.5 else None
        self.in_process = Calls()
        renderer = TemplateRenderer(self.model.tok)
        gconfig = GenerationHyperparameters(max_new_tokens=500)
        self._model = Model("m", self.model.generate, self.model.tok, renderer, gconfig)
        self.calls: list[Call] = []
        self.tools = TOOLS if rng.random() < 0.4 else None
        self.threads = [self._opening()]
        """Conversations of the agent, each ready to be asked."""

    def _opening(self):
        opening = [{"role": "user", "content": words(self.rng)}]
        if self.rng.random() < 0.4:
            opening.insert(0, {"role": "system", "content": words(self.rng)})
        return opening

    def _react(self, message):
        """What follows an answer: results of its calls, or the user's next words."""
        if calls := message.get("tool_calls"):
            return [
                {"role": "tool", "tool_call_id": each["id"], "content": words(self.rng)}
                for each in calls
            ]
        return [{"role": "user", "content": words(self.rng)}]

    async def ask(self, messages, n=1, retry=0, arrives=True):
        """Sends one request; returns the answers as messages, or [] if it failed."""
        body = {"messages": messages, "n": n, "max_tokens": 500}
        if self.tools:
            body["tools"] = self.tools

        async def find(_):
            return Session(
                "s", self._model, self.ledger.worker() if self.ledger else self.in_process
            )

        expected = self.transcript.prompt(templated(messages), self.tools)
        headers = {"x-stainless-retry-count": str(retry)}
        reply = await handle(find, "POST", "/v1/chat/completions", headers, orjson.dumps(body))
        prompt = self.model.prompts[-1]
        assert prompt == expected
        answers = []
        responses = self.model.sampled[-n:] if reply.status == 200 else [None] * n
        choices = orjson.loads(reply.body)["choices"] if reply.status == 200 else [None] * n
        delivered = arrives and reply.status == 200 and not self.ledger
        if delivered:
            await reply.arrived()
        for response, choice in zip(responses, choices, strict=True):
            if response is None:
                nothing = LLMResponse(prompt, [], [], [], StopReason.ABORT)
                self.calls.append(Call(nothing, bool(retry), delivered=False))
                self.transcript.said.append((messages, self.tools, None))
                continue
            self.calls.append(Call(response, bool(retry), delivered=delivered))
            message = choice["message"]
            message["content"] = message["content"] or ""
            answers.append(message)
            ended = [*templated(messages), *templated([message])]
            ids = [*prompt, *response.output_tokens]
            self.transcript.said.append((ended, self.tools, ids))
        return answers

    async def step(self, kind: str) -> None:
        """One thing that agents do."""
        rng, thread = self.rng, self.threads[-1]
        n = rng.randrange(2, 4) if kind == "samples" else 1
        if kind == "sub-agent":
            self.threads.append(self._opening())
            return
        if kind == "back":  # to the agent that started this one
            self.threads.insert(0, self.threads.pop())
            return
        if kind == "compact":  # the history becomes a summary, with the last messages or without
            start = 1 if thread[0]["role"] == "system" else 0
            summary = {"role": "user", "content": f"Summary: {words(rng)}"}
            rest = thread[-1:] if thread[-1]["role"] == "user" and len(thread) > start + 1 else []
            self.threads[-1] = [*thread[:start], summary, *rest] if not rest else [
                *thread[:start], summary, {"role": "assistant", "content": "yes"}, *rest
            ]  # fmt: skip
            return
        if kind == "edit":
            said = [i for i, m in enumerate(thread) if m["role"] == "assistant"]
            for at in said[-1:]:
                if calls := thread[at].get("tool_calls"):
                    other = {**calls[0], "function": {"name": "add", "arguments": '{"a": 2}'}}
                    thread[at] = {**thread[at], "tool_calls": [other, *calls[1:]]}
                else:
                    thread[at] = {**thread[at], "content": words(rng, plain=True)}
            return
        if kind == "tools":
            if not any(m["role"] == "tool" or m.get("tool_calls") for m in thread):
                self.tools = None if self.tools else TOOLS
            return
        self.model.failing = kind == "fail"
        answers = await self.ask(thread, n, arrives=kind != "retry")
        self.model.failing = False
        if kind in ("retry", "fail"):
            answers = await self.ask(thread, n, retry=1)
        elif kind == "late":  # the first answer arrives after all, and is the one that is used
            await self.ask(thread, n, retry=1)
        elif kind == "again":
            answers += await self.ask(thread)
        chosen = dict(rng.choice(answers))
        if rng.random() < 0.5:
            chosen.pop("reasoning_content", None)
        self.threads[-1] = [*thread, chosen, *self._react(chosen)]


def templated(messages):
    """As templates know them: no ids of answers, arguments as objects."""
    read = []
    for message in messages:
        one = {k: message[k] for k in ("role", "content", "tool_call_id") if k in message}
        if message.get("tool_calls"):
            one["tool_calls"] = [
                {
                    "id": call["id"],
                    "type": "function",
                    "function": {
                        "name": call["function"]["name"],
                        "arguments": orjson.loads(call["function"]["arguments"]),
                    },
                }
                for call in message["tool_calls"]
            ]
        read.append(one)
    return read


async def check(family: str, rng: random.Random) -> tuple[int, int]:
    """One history; returns how many trajectories and orphans it has."""
    agent = Agent(family, rng)
    for kind in rng.choices(STEPS, k=rng.randrange(1, 7)):
        await agent.step(kind)
    if not agent.model.sampled:
        await agent.step("turn")
    found = merge(agent.ledger.calls(), 1.0) if agent.ledger else agent.in_process.merged(1.0)
    expected, orphans = merged(agent.calls)
    assert found.orphans == orphans
    assert found.chains == [owned for owned, _ in expected]
    for trajectory, (owned, whole) in zip(found.trajectories, expected, strict=True):
        assert trajectory.input_ids.tolist() == whole
        versions = [-1] * len(whole)
        for number in owned:
            response = agent.calls[number].response
            start = len(response.input_tokens)
            versions[start : start + len(response.output_tokens)] = response.output_versions
        assert trajectory.token_versions.tolist() == versions
        assert trajectory.loss_mask.tolist() == [version >= 0 for version in versions]
    return len(expected), len(orphans)


@pytest.mark.timeout(60 + HISTORIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_histories_when_random_then_calls_merge_or_branch_as_the_slow_reference_says(family):
    async def all_of_them() -> tuple[int, int]:
        branched = lost = 0
        for seed in range(HISTORIES):
            try:
                trajectories, orphans = await check(family, random.Random(f"{family}-{seed}"))
            except BaseException:
                print(f"history {family}-{seed}")
                raise
            branched += trajectories > 1
            lost += orphans > 0
        return branched, lost

    branched, lost = asyncio.run(all_of_them())
    assert HISTORIES / 5 < branched < HISTORIES * 0.95
    assert lost > HISTORIES / 20

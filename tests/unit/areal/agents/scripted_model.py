"""A model that samples what it is told, behind a real endpoint."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from tests.unit.areal.workflows.chat_families import end_of_turn, tokenizer

from areal.agents.calls import Calls
from areal.agents.endpoint import Endpoint
from areal.agents.session import Model, Session
from areal.types import GenerationHyperparameters, LLMResponse, StopReason
from areal.workflows.rendering import TemplateRenderer


class Scripted:
    """Answers in turn, as texts or ids; keeps every request and what was sampled for it."""

    def __init__(self, *answers, family="qwen2.5"):
        self.family, self.tokenizer = family, tokenizer(family)
        self.answers = list(answers)
        self.requests, self.sampled = [], []
        self.errors = []
        self.hold: asyncio.Event | None = None
        self.cancelled = 0
        self.step = None
        """Awaited after each token that a watcher has seen; None: no one sees any."""

    async def generate(self, request):
        self.requests.append(request)
        if self.errors:
            raise self.errors.pop(0)
        if self.hold is not None:
            hold, self.hold = self.hold, None
            try:
                await hold.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        made = [self._one(request) for _ in range(request.gconfig.n_samples)]
        if request.on_tokens is not None and self.step is not None:
            for index, response in enumerate(made):
                for end in range(1, len(response.output_tokens)):
                    request.on_tokens(index, response.output_tokens[:end])
                    await self.step(index, end)
        return made

    def _one(self, request):
        answer = self.answers.pop(0)
        ids = answer
        if isinstance(answer, str):
            ids = self.tokenizer.encode(answer, add_special_tokens=False)
            ids = [*ids, end_of_turn(self.family)]
        ids = list(ids)[: request.gconfig.max_new_tokens]
        ended = ids[-1] in self.tokenizer.eos_token_ids
        stop = StopReason.STOP if ended else StopReason.LENGTH
        number = len(self.sampled)
        logprobs = [-0.5 - number - i / 64 for i in range(len(ids))]
        made = LLMResponse(list(request.input_ids), ids, logprobs, [number] * len(ids), stop)
        self.sampled.append(made)
        return made


@asynccontextmanager
async def serving(scripted, **gconfig):
    """(base URL, key, session, its calls)."""
    calls = Calls()
    model = Model(
        "areal",
        scripted.generate,
        scripted.tokenizer,
        TemplateRenderer(scripted.tokenizer),
        GenerationHyperparameters(**{"max_new_tokens": 400, **gconfig}),
    )
    session = Session("s0", model, calls)
    async with Endpoint() as endpoint:
        yield endpoint.base_url, endpoint.open(session), session, calls


def check_exact(calls, scripted, *, chains):
    """Every sampled id is trained on once, where and as it was sampled; returns trajectories."""
    merged = calls.merged(1.0)
    assert merged.chains == chains
    for trajectory, chain in zip(merged.trajectories, merged.chains, strict=True):
        expected = [i for number in chain for i in scripted.sampled[number].output_tokens]
        mask = trajectory.loss_mask
        assert trajectory.input_ids[mask].tolist() == expected
        versions = [v for number in chain for v in scripted.sampled[number].output_versions]
        assert trajectory.token_versions[mask].tolist() == versions
        last = scripted.sampled[chain[-1]]
        assert trajectory.input_ids.tolist() == last.input_tokens + last.output_tokens
    return merged.trajectories

"""The generation client in front of servers on loopback, and what a good answer is."""

from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from tests.fake_sglang import token_at

from areal.types import GenerationHyperparameters, LLMRequest, LLMResponse, StopReason
from areal_rollout.generation.client import SGLangClient
from areal_rollout.generation.protocol import ModelLimits
from areal_rollout.generation.server_table import ServerTable

PROMPT = [1, 2, 3]
EOS = 199


class Observer:
    def __init__(self):
        self.done, self.kinds, self.kept = [], [], []

    def request_done(self, seconds, tokens):
        self.done.append(tokens)

    def interruption(self, kind):
        self.kinds.append(kind)

    def salvaged(self, tokens):
        self.kept.append(tokens)


@asynccontextmanager
async def serving(
    *servers,
    request_timeout_s=10.0,
    setup_timeout_s=1.0,
    asleep_s=0.0,
    context=1000,
    vocab_size=200,
    eos=EOS,
    routes=None,
):
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server.running())
        table, reports = ServerTable(), []

        async def report(url, cause):
            reports.append((url, cause))

        client = SGLangClient(
            table,
            ModelLimits(vocab_size, context, (eos,), routes=routes),
            report=report,
            observer=Observer(),
            request_timeout_s=request_timeout_s,
            setup_timeout_s=setup_timeout_s,
            asleep_s=asleep_s,
        )
        client.reports, client.observer = reports, client._observer
        await client.start()
        stack.push_async_callback(client.close)
        table.update([server.listed() for server in servers])
        yield client


async def generate(client, request, response, **more):
    """One answer."""
    await client.generate(request, [response], **more)
    return response


def empty(prompt=PROMPT):
    return LLMResponse(list(prompt), [], [], [], StopReason.ABORT)


def request(n=6, prompt=PROMPT, **more):
    return LLMRequest(list(prompt), GenerationHyperparameters(max_new_tokens=n, **more))


def check(response, n, prompt=PROMPT):
    """The very tokens and logprobs of an uninterrupted run."""
    start = len(prompt)
    assert response.output_tokens == [token_at(start + i) for i in range(n)]
    assert response.output_logprobs == pytest.approx([-(start + i) / 100 for i in range(n)])
    assert len(response.output_versions) == n

"""Agents on the CPU engine: what is trained is what the engine sampled, id by id."""

from __future__ import annotations

import asyncio
import json
import urllib.request

import anthropic
import numpy as np
import openai
import pytest
from tests.inference_server import running_server
from tests.integration.generation_rig import Observer

from areal.agents.workflow import AgentWorkflow
from areal.models.tiny import make_tiny_model
from areal.tokenizer import Tokenizer
from areal.types import GenerationHyperparameters
from areal.weights.servers import InferenceServer, ServerState
from areal_rollout.episode import EpisodeEngine
from areal_rollout.generation.client import SGLangClient
from areal_rollout.generation.protocol import ModelLimits
from areal_rollout.generation.server_table import ServerTable


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(address of a CPU engine, its tokenizer)."""
    folder = make_tiny_model(tmp_path_factory.mktemp("model"), num_hidden_layers=1)
    with running_server(folder) as server:
        body = {"model_path": str(folder), "weight_version": "0"}
        url = f"{server.url}/update_weights_from_disk"
        data = json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["success"]
        yield server.url, Tokenizer.load(folder)


@pytest.fixture
async def engine(served):
    url, tokenizer = served

    async def report(*_):
        pass

    table = ServerTable()
    client = SGLangClient(
        table,
        ModelLimits(tokenizer.vocab_size, 2048, tuple(tokenizer.eos_token_ids)),
        report=report,
        observer=Observer(),
        request_timeout_s=60.0,
        setup_timeout_s=60.0,
    )
    await client.start()
    table.update([InferenceServer(url, url, ServerState.SERVING, 0, "")])
    yield Recording(EpisodeEngine(client, None, tokenizer, group="t", min_version=0))
    await client.close()


class Recording:
    """An engine, and all that it sampled."""

    def __init__(self, engine):
        self.engine, self.tokenizer, self.sampled = engine, engine.tokenizer, []

    async def agenerate_group(self, request):
        responses = await self.engine.agenerate_group(request)
        self.sampled += responses
        return responses


async def chat_agent(task, base_url, api_key):
    """Several turns, streamed and not, a second sample of one of them, and a sub-agent."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as llm:
        messages = [{"role": "user", "content": task["question"]}]
        for turn in range(3):
            if turn == 1:
                text = ""
                stream = await llm.chat.completions.create(
                    model="any", messages=messages, stream=True
                )
                async for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                said = {"role": "assistant", "content": text}
            else:
                answer = await llm.chat.completions.create(model="any", messages=messages, n=2)
                said = answer.choices[1].message
            messages += [said, {"role": "user", "content": f"again {turn}"}]
        sub = [{"role": "user", "content": "summarize"}]
        await asyncio.gather(
            *(llm.chat.completions.create(model="any", messages=sub) for _ in range(2))
        )
        await llm.completions.create(model="any", prompt="1+1=", max_tokens=5)
    return 1.0


async def message_agent(task, base_url, api_key):
    async with anthropic.AsyncAnthropic(base_url=base_url, api_key=api_key) as llm:
        messages = [{"role": "user", "content": task["question"]}]
        for turn in range(3):
            arguments = {"model": "any", "max_tokens": 20, "messages": messages}
            if turn % 2:
                async with llm.messages.stream(**arguments) as stream:
                    said = await stream.get_final_message()
            else:
                said = await llm.messages.create(**arguments)
            messages += [
                {"role": "assistant", "content": said.content},
                {"role": "user", "content": f"again {turn}"},
            ]
    return 1.0


async def token_agent(task, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as llm:
        ids = list(range(40, 50))
        for _ in range(3):
            url = f"{base_url.removesuffix('/v1')}/inference/v1/generate"
            body = {"token_ids": ids, "sampling_params": {"max_tokens": 7, "logprobs": 1}}
            answer = await llm.post(url, body=body, cast_to=object)
            ids += answer["choices"][0]["token_ids"]
            ids.append(65)
    return 1.0


async def response_agent(task, base_url, api_key):
    """Turns by id and by items, streamed and not, with tools on offer, and a branch."""
    add = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as llm:
        asked = {"model": "any", "instructions": "Add.", "tools": [add]}
        first = await llm.responses.create(input=task["question"], **asked)
        stream = await llm.responses.create(
            input="again", previous_response_id=first.id, stream=True, **asked
        )
        events = [event async for event in stream]
        items = [
            {"role": "user", "content": task["question"]},
            *first.output,
            {"role": "user", "content": "again"},
            *events[-1].response.output,
            {"role": "user", "content": "and again"},
        ]
        await llm.responses.create(input=items, **asked)
        await llm.responses.create(input="or so", previous_response_id=first.id, **asked)
        await llm.responses.create(input="summarize", model="any", store=False)
    return 1.0


@pytest.mark.parametrize(
    ("run", "calls", "trajectories"),
    [(chat_agent, 8, 6), (response_agent, 5, 3), (message_agent, 3, 1), (token_agent, 3, 1)],
)
async def test_agent_when_run_then_its_trajectories_are_what_the_engine_sampled(
    engine, run, calls, trajectories
):
    samples = 2
    workflow = AgentWorkflow(run, GenerationHyperparameters(n_samples=samples, max_new_tokens=16))
    async with asyncio.timeout(120):
        found = await workflow.arun_episode(engine, {"question": "12+34="})
    assert (len(engine.sampled), len(found)) == (calls * samples, trajectories * samples)
    # By content: sessions ran at once. Each sampled answer is in one trajectory, where it was.
    unseen = [(r.input_tokens, r.output_tokens, r.output_logprobs) for r in engine.sampled]
    for trajectory in found:
        ids, mask = trajectory.input_ids.tolist(), trajectory.loss_mask
        edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
        for start, end in edges.reshape(-1, 2).tolist():
            logprobs = trajectory.behavior_logprobs[start:end].tolist()
            match = next(
                each
                for each in unseen
                if each[0] == ids[:start]
                and each[1] == ids[start:end]
                and logprobs == [np.float32(p) for p in each[2]]
            )
            unseen.remove(match)
        assert (trajectory.token_versions >= 0).tolist() == mask.tolist()
    assert unseen == []

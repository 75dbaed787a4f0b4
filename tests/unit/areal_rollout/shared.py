"""x"""

import asyncio

from areal.types import GenerationHyperparameters, LLMRequest
from areal.workflows.base import make_trajectory


def request(prompt=(1, 2), n=6):
    return LLMRequest(list(prompt), GenerationHyperparameters(max_new_tokens=n))


async def one_sample(engine, data):
    response = await engine.agenerate(request())
    [reward] = await engine.score("math", completions=["x"], data=data)
    return make_trajectory(response, reward)


async def group_of_four(engine, data):
    responses = await asyncio.gather(*[engine.agenerate(request()) for _ in range(4)])
    rewards = await engine.score("math", completions=["x"] * 4, data=data)
    return [make_trajectory(r, w) for r, w in zip(responses, rewards, strict=True)]

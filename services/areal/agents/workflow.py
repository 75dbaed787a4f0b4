"""A workflow that runs an unchanged agent, which needs only a base URL and an API key."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar

from areal.agents.calls import Calls
from areal.agents.endpoint import Endpoint
from areal.agents.session import Model, Session
from areal.errors import InvalidInput
from areal.types import GenerationHyperparameters, LLMRequest, LLMResponse, Score, Trajectory
from areal.workflows.base import InferenceEngine, RolloutWorkflow
from areal.workflows.rendering import TemplateRenderer

Run = Callable[[dict[str, Any], str, str], Awaitable[float | None]]
"""`async def run(task, base_url, api_key)`: one attempt at a row; returns its reward: a number, or
a `rubric(...)`."""


class AgentWorkflow(RolloutWorkflow):
    """Runs an agent `gconfig.n_samples` times on each row and records the tokens of its calls.

    The agent calls the model through the OpenAI or Anthropic API. Every call is recorded with the
    sampled token ids. A call whose prompt starts with an earlier call's prompt and answer continues
    that call's trajectory. A sub-agent, a branch or a rewritten history becomes a separate
    trajectory with the same reward.

    Example:
        >>> async def run(task, base_url, api_key):
        ...     client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key)
        ...     answer = await my_agent(client, task["question"])
        ...     return float(answer == task["answer"])
        >>> AgentWorkflow(run, config.gconfig)
    """

    replayable: ClassVar[bool] = False

    def __init__(
        self,
        run: Run,
        gconfig: GenerationHyperparameters | None = None,
        template: dict[str, Any] | None = None,
    ) -> None:
        """Checks and stores the arguments.

        Args:
            run: An async function of the recipe, `run(task, base_url, api_key)`, where `task` is
                the row. The function returns the reward (a number or a `rubric(...)`), or None if
                the agent has sent its rewards with `POST {base_url}/reward`.
            gconfig: Sampling parameters, which override the agent's own. `max_new_tokens` limits
                each call. None means the defaults of `GenerationHyperparameters`.
            template: Variables for the chat template, such as `{"enable_thinking": False}`.

        Raises:
            InvalidInput: `run` is not an async function.
        """
        if not inspect.iscoroutinefunction(run):
            raise InvalidInput(f"run {run!r}: expected an async function (task, base_url, api_key)")
        self.run = run
        self.gconfig = gconfig or GenerationHyperparameters()
        self.template = template or {}

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        """Returns one group: the trajectories of `n_samples` concurrent runs of the agent."""

        async def generate(request: LLMRequest) -> list[LLMResponse]:
            return await engine.agenerate_group(request)

        renderer = TemplateRenderer(engine.tokenizer, **self.template)
        model = Model("areal", generate, engine.tokenizer, renderer, self.gconfig)
        async with Endpoint() as endpoint, asyncio.TaskGroup() as group:
            runs = [
                group.create_task(self._attempt(model, endpoint, data, number))
                for number in range(self.gconfig.n_samples)
            ]
        return [trajectory for one in runs for trajectory in one.result()]

    async def _attempt(
        self, model: Model, endpoint: Endpoint, data: dict[str, Any], number: int
    ) -> list[Trajectory]:
        """Returns the trajectories of one run."""
        calls = Calls()
        key = endpoint.open(session := Session(f"s{number}", model, calls))
        try:
            reward = await self.run(dict(data), endpoint.base_url, key)
        except Exception as error:
            if session.failure is not None:
                # The agent fell over a model that could not answer: that is not its fault.
                raise session.failure from error
            raise
        if session.failure is not None:
            # The agent gave up on a model that could not answer; its reward says nothing.
            raise session.failure
        if reward is None:
            return calls.merged(calls.outcome).trajectories
        outcome = reward if isinstance(reward, Score) else float(reward)
        return calls.merged(outcome).trajectories

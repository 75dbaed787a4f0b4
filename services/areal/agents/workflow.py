"""A workflow that runs an unchanged agent, which needs only a base URL and an API key."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Literal, get_args

from areal.agents.calls import Calls
from areal.agents.endpoint import Endpoint
from areal.agents.session import Model, Session
from areal.agents.splits import mark
from areal.agents.tree import Merged
from areal.chassis.logging import get_logger
from areal.errors import InvalidInput, WorkflowError
from areal.types import GenerationHyperparameters, LLMRequest, LLMResponse, Score, Trajectory
from areal.workflows.base import InferenceEngine, RolloutWorkflow
from areal.workflows.large_text import apart
from areal.workflows.rendering import TemplateRenderer

Run = Callable[[dict[str, Any], str, str], Awaitable[float | None]]
"""`async def run(task, base_url, api_key)`: one attempt at a row; returns its reward: a number, or
a `rubric(...)`."""
OnError = Literal["fail", "drop", "zero"]
"""What happens to a failed attempt."""


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
        *,
        timeout_s: float | None = None,
        on_error: OnError = "fail",
    ) -> None:
        """Checks and stores the arguments.

        Args:
            run: An async function of the recipe, `run(task, base_url, api_key)`, where `task` is
                the row. The function returns the reward (a number or a `rubric(...)`), or None if
                the agent has sent its rewards with `POST {base_url}/reward`.
            gconfig: Sampling parameters, which override the agent's own. `max_new_tokens` limits
                each call. None means the defaults of `GenerationHyperparameters`.
            template: Variables for the chat template, such as `{"enable_thinking": False}`.
            timeout_s: Seconds that one attempt may take; then it is cancelled, which counts as an
                error of the attempt. None: only the episode's own time limit applies.
            on_error: What an attempt comes to whose `run` raises an error or takes too long. "fail"
                discards all attempts of the row, which is tried again; after three failures the
                row becomes a dead letter. "drop" leaves the attempt out of its group. "zero" gives
                it the reward 0, including answers that had a reward; an attempt without any answer
                is dropped. If no attempt of the row is left, the row fails.

        Raises:
            InvalidInput: `run` is not an async function, or another argument is not as above.
        """
        if not inspect.iscoroutinefunction(run):
            raise InvalidInput(f"run {run!r}: expected an async function (task, base_url, api_key)")
        if timeout_s is not None and not timeout_s > 0:
            raise InvalidInput(f"timeout_s {timeout_s}: expected a number of seconds above 0")
        if on_error not in get_args(OnError):
            raise InvalidInput(
                f"on_error {on_error!r}: expected one of {', '.join(get_args(OnError))}"
            )
        self.run = run
        self.timeout_s, self.on_error = timeout_s, on_error
        self.gconfig = gconfig or GenerationHyperparameters()
        self.template = template or {}

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        """Returns one group: the trajectories of `n_samples` concurrent runs of the agent.

        Raises:
            WorkflowError: No attempt is left; names the error of the first.
        """
        failures: list[Exception] = []

        async def generate(request: LLMRequest) -> list[LLMResponse]:
            return await engine.agenerate_group(request)

        renderer = TemplateRenderer(engine.tokenizer, **self.template)
        model = Model("areal", generate, engine.tokenizer, renderer, self.gconfig)
        async with Endpoint() as endpoint, asyncio.TaskGroup() as group:
            runs = [
                group.create_task(self._attempt(model, endpoint, data, number, failures))
                for number in range(self.gconfig.n_samples)
            ]
        attempts = [merged for one in runs if (merged := one.result()) is not None]
        for merged in attempts:
            size = sum(len(each.input_ids) for each in merged.trajectories)
            await apart(size, mark, merged, engine.tokenizer)
        trajectories = [trajectory for merged in attempts for trajectory in merged.trajectories]
        if failures and not trajectories:
            raise WorkflowError(
                f"AgentWorkflow: all {len(runs)} attempts failed; the first: {_named(failures[0])}"
            ) from failures[0]
        return trajectories

    async def _attempt(
        self,
        model: Model,
        endpoint: Endpoint,
        data: dict[str, Any],
        number: int,
        failures: list[Exception],
    ) -> Merged | None:
        """Returns what one run came to; adds its error if the group continues without it."""
        calls = Calls()
        key = endpoint.open(session := Session(f"s{number}", model, calls))
        try:
            reward = await self._timed(dict(data), endpoint.base_url, key)
            if session.failure is not None:
                # The agent gave up on a model that could not answer; its reward says nothing.
                raise session.failure
            if reward is None:
                return calls.merged(calls.outcome)
            outcome = reward if isinstance(reward, Score) else float(reward)
            return calls.merged(outcome)
        except Exception as error:
            if session.failure is not None:
                # The agent fell over a model that could not answer: that is not its fault.
                raise session.failure from error
            if self.on_error == "fail":
                raise
            failures.append(error)
            get_logger(__name__).warning(
                "an attempt failed", attempt=number, on_error=self.on_error, error=_named(error)
            )
            return calls.zeros() if self.on_error == "zero" else None

    async def _timed(self, data: dict[str, Any], base_url: str, key: str) -> float | None:
        limit = asyncio.timeout(self.timeout_s)
        try:
            async with limit:
                return await self.run(data, base_url, key)
        except TimeoutError:
            if not limit.expired():
                raise  # one of the agent's own
            raise WorkflowError(
                f"run: the attempt took longer than timeout_s = {self.timeout_s:g} s"
            ) from None


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

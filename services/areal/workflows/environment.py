"""A text environment, played turn by turn: reset, then one step for each answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

from areal.errors import InvalidInput, PromptTooLong, WorkflowError
from areal.types import GenerationHyperparameters, LLMRequest, LLMResponse, Score, Trajectory
from areal.workflows.base import InferenceEngine, RolloutWorkflow
from areal.workflows.conversation import Conversation
from areal.workflows.gyms import find_environment
from areal.workflows.large_text import apart, size_of
from areal.workflows.rendering import Message, TemplateRenderer
from areal.workflows.threads import BlockingCalls, CallOverdue

T = TypeVar("T")


class Environment(Protocol):
    """The methods that `EnvWorkflow` calls on an environment; each episode creates its own object.

    The methods may block, because they run in a thread. Each object gets one call at a time.
    """

    def reset(self, data: dict[str, Any]) -> str:
        """Starts an episode on a dataset row and returns the text that the model reads first."""
        ...

    def step(self, action: str) -> tuple[str, float, bool]:
        """Performs the model's action.

        Args:
            action: The text of the model's answer.

        Returns:
            A tuple: the text that the model reads next, the reward of this answer, and whether the
            episode has ended.
        """
        ...


class EnvWorkflow(RolloutWorkflow):
    """Runs `gconfig.n_samples` episodes of an environment on each row.

    Each reward is placed on the last token of the answer that earned it. The loss covers the
    model's answers only, never the environment's text. When all episodes of a row have ended, the
    `close()` method of each environment is called, if it has one.

    Example:
        >>> EnvWorkflow(GuessNumber, config.gconfig)                 # a class of the recipe
        >>> EnvWorkflow("reasoning_gym:chain_sum", config.gconfig)   # rows of reasoning_gym_rows
        >>> EnvWorkflow("gymnasium:FrozenLake-v1", config.gconfig, options={"is_slippery": False})
        >>> EnvWorkflow("my_package.worlds:Maze", config.gconfig)
    """

    replayable: ClassVar[bool] = False

    def __init__(
        self,
        environment: str | Callable[..., Any],
        gconfig: GenerationHyperparameters | None = None,
        max_turns: int = 8,
        options: dict[str, Any] | None = None,
        step_timeout_s: float = 30.0,
        system_prompt: str | None = None,
        template: dict[str, Any] | None = None,
    ) -> None:
        """Finds the environment's class; each episode creates its own environment.

        Args:
            environment: A class or function of the recipe that returns an `Environment`, or a name:
                "NAME:REST" of a library in `areal.workflows.gyms.SOURCES` (docs/workflows.md), or
                "module:Class". For a reasoning_gym task, create the rows with
                `areal.workflows.gyms.reasoning_gym_rows`.
            gconfig: Sampling parameters; `max_new_tokens` limits each answer. None means the
                defaults of `GenerationHyperparameters`.
            max_turns: Maximum number of answers in an episode.
            options: Keyword arguments for creating the environment.
            step_timeout_s: Time limit for each call to the environment, in seconds.
            system_prompt: Text of a system message, placed before the environment's first text.
            template: Variables for the chat template, such as `{"enable_thinking": False}`.

        Raises:
            InvalidInput: The environment does not exist, its package is not installed, `max_turns`
                is below 1, or `step_timeout_s` is not above 0.
        """
        if max_turns < 1:
            raise InvalidInput(f"max_turns {max_turns}: expected 1 or more")
        if step_timeout_s <= 0:
            raise InvalidInput(f"step_timeout_s {step_timeout_s:g}: expected above 0")
        made = find_environment(environment) if isinstance(environment, str) else environment
        if not callable(made):
            raise InvalidInput(f"environment {environment!r}: expected a name, class or function")
        self.make: Callable[..., Environment] = made
        self.gconfig = gconfig or GenerationHyperparameters()
        self.max_turns = max_turns
        self.options = options or {}
        self.step_timeout_s = step_timeout_s
        self.system_prompt = system_prompt
        self.template = template or {}
        self._calls = BlockingCalls()

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        """Returns one group: `n_samples` trajectories from concurrent runs of the environment."""
        worlds: list[Environment] = []
        try:
            for _ in range(self.gconfig.n_samples):
                worlds.append(await self._wait("start", self.make, **self.options))
            firsts = [await self._wait("reset", world.reset, dict(data)) for world in worlds]
            renderer = TemplateRenderer(engine.tokenizer, **self.template)
            openings = [self._opening(first) for first in firsts]
            chats = [
                await apart(size_of(opening), Conversation, renderer, opening)
                for opening in openings
            ]
            answers: list[LLMResponse | None] = [None] * len(chats)
            if len(set(firsts)) == 1:  # one request for all first answers
                request = LLMRequest(chats[0].input_ids, self.gconfig)
                answers = [*await engine.agenerate_group(request)]
            episodes = zip(worlds, chats, answers, strict=True)
            return await asyncio.gather(*(self._play(engine, *each) for each in episodes))
        finally:
            for world in worlds:
                if (close := getattr(world, "close", None)) is not None:
                    await self._wait("close", close)

    def _opening(self, observation: str) -> list[Message]:
        said: list[Message] = [{"role": "user", "content": observation}]
        if self.system_prompt is not None:
            said.insert(0, {"role": "system", "content": self.system_prompt})
        return said

    async def _play(
        self,
        engine: InferenceEngine,
        world: Environment,
        chat: Conversation,
        response: LLMResponse | None,
    ) -> Trajectory:
        rewards: list[float] = []
        while True:
            if response is None:
                try:
                    response = await engine.agenerate(LLMRequest(chat.input_ids, self.gconfig))
                except InvalidInput:
                    if not rewards:
                        raise
                    break  # likewise
            reply, response = chat.add_response(response), None
            observation, reward, ended = await self._wait("step", world.step, reply.text)
            rewards.append(reward if isinstance(reward, Score) else float(reward))
            if ended or len(rewards) == self.max_turns:
                break
            said: Message = {"role": "user", "content": observation}
            try:
                await apart(size_of([said]), chat.add_messages, said)
            except PromptTooLong:  # the context is full: the answers that there are count
                break
        return chat.trajectory(rewards)

    async def _wait(self, what: str, call: Callable[..., T], *arguments: Any, **named: Any) -> T:
        name = getattr(call, "__qualname__", what)
        bound = partial(call, *arguments, **named)
        try:
            return await self._calls.run(name, self.step_timeout_s, bound)
        except CallOverdue:
            raise WorkflowError(f"{name}: no {what} within {self.step_timeout_s:g} s") from None

"""A model that calls Python functions of the recipe, until it answers without a call."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

from pydantic import ValidationError

from areal.errors import InvalidInput
from areal.types import GenerationHyperparameters, LLMRequest, LLMResponse, Trajectory
from areal.workflows.base import InferenceEngine, RewardFn, RolloutWorkflow
from areal.workflows.conversation import Conversation
from areal.workflows.multi_turn import row_messages
from areal.workflows.rendering import Message, TemplateRenderer, ToolCall
from areal.workflows.threads import BlockingCalls, TooManyHung
from areal.workflows.tool_schema import arguments_of, schema_of


class ToolWorkflow(RolloutWorkflow):
    """Samples `gconfig.n_samples` conversations with tools on a row; scores the last answer.

    The calls of one answer run at once. What tools return is context: the loss covers exactly what
    the model sampled. If a call has wrong arguments or raises, the model reads the error.

    Example:
        >>> def multiply(a: int, b: int) -> int:
        ...     "Multiplies two numbers."
        ...     return a * b
        >>> ToolWorkflow([multiply], "math", config.gconfig)
    """

    replayable: ClassVar[bool] = False

    def __init__(
        self,
        tools: Sequence[Callable[..., Any]],
        reward_fn: RewardFn = "math",
        gconfig: GenerationHyperparameters | None = None,
        max_turns: int = 8,
        tool_timeout_s: float = 30.0,
        system_prompt: str | None = None,
        template: dict[str, Any] | None = None,
    ) -> None:
        """Checks the arguments that can be checked without a row.

        Args:
            tools: Functions of the recipe, async or not (the latter run in threads). The model sees
                a schema made from the annotations and defaults of their parameters, and their
                docstrings as descriptions.
            reward_fn: A built-in reward's name, or a function of the recipe.
            gconfig: How to sample; `max_new_tokens` is for each answer.
            max_turns: Maximum number of answers in a conversation, including the last one.
            tool_timeout_s: Limit of one call, in seconds.
            system_prompt: Put before the row's messages.
            template: Variables for the chat template.

        Raises:
            InvalidInput: A tool has a parameter without a type, or a number is out of range.
        """
        if max_turns < 1:
            raise InvalidInput(f"max_turns {max_turns}: expected 1 or more")
        self.tools = {tool.__name__: tool for tool in tools}
        self.arguments = {name: arguments_of(tool) for name, tool in self.tools.items()}
        self.reward_fn = reward_fn
        self.gconfig = gconfig or GenerationHyperparameters()
        self.max_turns = max_turns
        self.tool_timeout_s = tool_timeout_s
        self.system_prompt = system_prompt
        self.template = template or {}
        self._calls = BlockingCalls()

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        """Samples n conversations about one row and returns one group."""
        renderer = TemplateRenderer(engine.tokenizer, **self.template)
        schemas = [schema_of(tool, self.arguments[name]) for name, tool in self.tools.items()]
        opening = row_messages(data, self.system_prompt)
        chats = [
            Conversation(renderer, opening, tools=schemas) for _ in range(self.gconfig.n_samples)
        ]
        request = LLMRequest(chats[0].input_ids, self.gconfig)
        firsts = await engine.agenerate_group(request)  # one request for all first answers
        return await asyncio.gather(
            *(self._converse(engine, data, *pair) for pair in zip(chats, firsts, strict=True))
        )

    async def _converse(
        self,
        engine: InferenceEngine,
        data: dict[str, Any],
        chat: Conversation,
        response: LLMResponse,
    ) -> Trajectory:
        prompt, turns = engine.tokenizer.decode(chat.input_ids), 0
        while True:
            reply = chat.add_response(response)
            turns += 1
            if not reply.tool_calls or turns == self.max_turns:
                break
            results = await asyncio.gather(*(self._call(call) for call in reply.tool_calls))
            chat.add_messages(*results)
            try:
                response = await engine.agenerate(LLMRequest(chat.input_ids, self.gconfig))
            except InvalidInput:  # the context is full: the answers that there are count
                break
        [reward] = await engine.score(
            self.reward_fn, completions=[reply.text], data=data, prompt=prompt
        )
        return chat.trajectory(reward)

    async def _call(self, call: ToolCall) -> Message:
        """Runs one call; the model reads its errors.

        Raises:
            TooManyHung: So many calls hang that no other is started.
        """
        tool = self.tools.get(call.name)
        if tool is None:
            result: Any = f"error: no tool {call.name!r}; expected one of {', '.join(self.tools)}"
        else:
            try:
                checked = self.arguments[call.name].model_validate(call.arguments)
                arguments = {name: getattr(checked, name) for name in checked.model_fields_set}
                if inspect.iscoroutinefunction(tool):
                    async with asyncio.timeout(self.tool_timeout_s):
                        result = await tool(**arguments)
                else:
                    bound = partial(tool, **arguments)
                    result = await self._calls.run(call.name, self.tool_timeout_s, bound)
            except TooManyHung:
                raise
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                where = ".".join(str(part) for part in first["loc"])
                result = f"error: {where}: {first['msg']}"
            except TimeoutError:
                result = f"error: no result within {self.tool_timeout_s:g} s"
            except Exception as error:
                result = f"error: {type(error).__name__}: {error}"
        return {"role": "tool", "name": call.name, "content": str(result)}

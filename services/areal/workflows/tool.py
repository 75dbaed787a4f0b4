"""A model that calls functions of the recipe and tools of MCP servers, until it just answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from areal.errors import InvalidInput, PromptTooLong
from areal.tokenizer.chat_contents import check_chat
from areal.types import (
    GenerationHyperparameters,
    LLMRequest,
    LLMResponse,
    McpServer,
    Trajectory,
)
from areal.workflows.base import InferenceEngine, RewardFn, RolloutWorkflow
from areal.workflows.conversation import Conversation
from areal.workflows.large_text import apart, size_of
from areal.workflows.mcp_tools import Connection, check_server, connections
from areal.workflows.multi_turn import row_messages
from areal.workflows.rendering import Message, TemplateRenderer
from areal.workflows.tool_calls import ToolCalls, refuse_other_tools


class ToolWorkflow(RolloutWorkflow):
    """Samples `gconfig.n_samples` conversations per row; in each, the model may call tools.

    A conversation ends after an answer without a tool call, after `max_turns` answers, or when the
    context is full. The conversation's reward is that of the last answer. The tool calls of one
    answer run concurrently. The loss covers only the tokens that the model sampled, not the tools'
    results. A row may list `tools` only if all of them are tools of the workflow, because no others
    can be called. If a call has wrong arguments or raises an error, the model reads the error.

    Example:
        >>> def multiply(a: int, b: int) -> int:
        ...     "Multiplies two numbers."
        ...     return a * b
        >>> ToolWorkflow([multiply], "math", config.gconfig)
        >>> ToolWorkflow([multiply, McpServer(["npx", "my-mcp-server"])], "math", config.gconfig)
    """

    replayable: ClassVar[bool] = False

    def __init__(
        self,
        tools: Sequence[Callable[..., Any] | McpServer],
        reward_fn: RewardFn = "math",
        gconfig: GenerationHyperparameters | None = None,
        max_turns: int = 8,
        tool_timeout_s: float = 30.0,
        system_prompt: str | None = None,
        template: dict[str, Any] | None = None,
    ) -> None:
        """Checks and stores the arguments.

        Args:
            tools: Functions of the recipe, or `McpServer` objects, which add all of their tools. A
                function that is not async runs in a thread. The model sees each function's
                docstring, and a schema made from the type annotations and defaults of its
                parameters.
            reward_fn: The name of a built-in reward, or a function of the recipe, as in
                `RLVRWorkflow`.
            gconfig: Sampling parameters; `max_new_tokens` limits each answer. None means the
                defaults of `GenerationHyperparameters`.
            max_turns: Maximum number of answers in a conversation.
            tool_timeout_s: Time limit for each tool call, in seconds.
            system_prompt: Text of a system message, placed before the row's messages.
            template: Variables for the chat template, such as `{"enable_thinking": False}`.

        Raises:
            InvalidInput: A parameter of a tool has no type annotation, `max_turns` is below 1, an
                `McpServer` does not have exactly one of `command` and `url`, or there is an
                `McpServer` but the package `mcp` is not installed.
        """
        if max_turns < 1:
            raise InvalidInput(f"max_turns {max_turns}: expected 1 or more")
        self.servers = [tool for tool in tools if isinstance(tool, McpServer)]
        for server in self.servers:
            check_server(server)
        functions = [tool for tool in tools if not isinstance(tool, McpServer)]
        self.calls = ToolCalls(functions, tool_timeout_s)
        self.reward_fn = reward_fn
        self.gconfig = gconfig or GenerationHyperparameters()
        self.max_turns = max_turns
        self.system_prompt = system_prompt
        self.template = template or {}

    def prompt_ids(self, engine: InferenceEngine, data: dict[str, Any]) -> list[int]:
        """Returns the token ids of a row's first prompt, without the tools of MCP servers."""
        schemas = self.calls.schemas([])
        if not self.servers:
            refuse_other_tools(data, schemas)
        return self._chats(engine, data, schemas, 1)[0].input_ids

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        """Returns one group: a trajectory for each of `n_samples` conversations about one row."""
        n = self.gconfig.n_samples
        async with connections(self.servers, n) as connected:
            schemas = self.calls.schemas(connected[0])
            refuse_other_tools(data, schemas)
            chats = self._chats(engine, data, schemas, n)
            request = LLMRequest(chats[0].input_ids, self.gconfig)
            firsts = await engine.agenerate_group(request)  # one request for all first answers
            parts = zip(connected, chats, firsts, strict=True)
            return await asyncio.gather(*(self._converse(engine, data, *part) for part in parts))

    def _chats(
        self, engine: InferenceEngine, data: dict[str, Any], schemas: list[Message], count: int
    ) -> list[Conversation]:
        """Returns equal conversations at their first prompt."""
        opening = row_messages(data, self.system_prompt)
        check_chat(engine.tokenizer, opening, added=int(self.system_prompt is not None))
        renderer = TemplateRenderer(engine.tokenizer, **self.template)
        if schemas:
            renderer.check_tools(opening, schemas)
        return [Conversation(renderer, opening, tools=schemas) for _ in range(count)]

    async def _converse(
        self,
        engine: InferenceEngine,
        data: dict[str, Any],
        connected: list[Connection],
        chat: Conversation,
        response: LLMResponse,
    ) -> Trajectory:
        prompt, turns = engine.tokenizer.decode(chat.input_ids), 0
        while True:
            reply = chat.add_response(response)
            turns += 1
            if not reply.tool_calls or turns == self.max_turns:
                break
            calls = (self.calls.run(call, connected) for call in reply.tool_calls)
            results = await asyncio.gather(*calls)
            try:
                await apart(size_of(results), chat.add_messages, *results)
            except PromptTooLong:  # the context is full: the answers that there are count
                break
            try:
                response = await engine.agenerate(LLMRequest(chat.input_ids, self.gconfig))
            except InvalidInput:  # likewise
                break
        [reward] = await engine.score(
            self.reward_fn, completions=[reply.text], data=data, prompt=prompt
        )
        return chat.trajectory(reward)

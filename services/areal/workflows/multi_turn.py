"""Several tries at one problem: after a wrong answer the model reads feedback and tries again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from areal.errors import InvalidInput
from areal.tokenizer.chat_contents import check_chat
from areal.tokenizer.chat_template import plain_tools
from areal.types import GenerationHyperparameters, LLMRequest, LLMResponse, Trajectory
from areal.workflows.base import InferenceEngine, RewardFn, RolloutWorkflow
from areal.workflows.conversation import Conversation
from areal.workflows.rendering import Message, TemplateRenderer


class MultiTurnWorkflow(RolloutWorkflow):
    """Samples `gconfig.n_samples` conversations per row; after a wrong answer the model retries.

    A conversation ends after an answer whose reward is above 0, after `max_turns` answers, or when
    the context is full. The conversation's reward is that of its last answer, multiplied by
    `turn_discount` once for each earlier answer. A row may have `tools`, as in `RLVRWorkflow`.

    Example:
        >>> MultiTurnWorkflow("math", config.gconfig, max_turns=3, turn_discount=0.9)
    """

    def __init__(
        self,
        reward_fn: RewardFn = "math",
        gconfig: GenerationHyperparameters | None = None,
        max_turns: int = 2,
        feedback: str | Callable[..., str] = "That is not correct. Try again.",
        turn_discount: float = 1.0,
        system_prompt: str | None = None,
        template: dict[str, Any] | None = None,
    ) -> None:
        """Checks and stores the arguments.

        Args:
            reward_fn: The name of a built-in reward, or a function of the recipe, as in
                `RLVRWorkflow`.
            gconfig: Sampling parameters; `max_new_tokens` limits each answer. None means the
                defaults of `GenerationHyperparameters`.
            max_turns: Maximum number of answers in a conversation.
            feedback: The user's message after a wrong answer, or a function of the recipe that
                returns this message: `feedback(completion, reward, **data) -> str`.
            turn_discount: Factor for each earlier answer, from 0 to 1.
            system_prompt: Text of a system message, placed before the row's messages.
            template: Variables for the chat template, such as `{"enable_thinking": False}`.

        Raises:
            InvalidInput: `max_turns` is below 1, or `turn_discount` is not between 0 and 1.
        """
        if max_turns < 1:
            raise InvalidInput(f"max_turns {max_turns}: expected 1 or more")
        if not 0.0 <= turn_discount <= 1.0:
            raise InvalidInput(f"turn_discount {turn_discount:g}: expected 0 to 1")
        self.reward_fn = reward_fn
        self.gconfig = gconfig or GenerationHyperparameters()
        self.max_turns = max_turns
        self.feedback = feedback
        self.turn_discount = turn_discount
        self.system_prompt = system_prompt
        self.template = template or {}

    def prompt_ids(self, engine: InferenceEngine, data: dict[str, Any]) -> list[int]:
        """Returns the token ids of a row's first prompt."""
        return self._chats(engine, data, 1)[0].input_ids

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        """Returns one group: a trajectory for each of `n_samples` conversations about one row."""
        chats = self._chats(engine, data, self.gconfig.n_samples)
        request = LLMRequest(chats[0].input_ids, self.gconfig)
        firsts = await engine.agenerate_group(request)  # one request for all first answers
        return await asyncio.gather(
            *(self._converse(engine, data, *pair) for pair in zip(chats, firsts, strict=True))
        )

    def _chats(
        self, engine: InferenceEngine, data: dict[str, Any], count: int
    ) -> list[Conversation]:
        """Returns equal conversations at their first prompt."""
        messages = row_messages(data, self.system_prompt)
        tools = plain_tools(data.get("tools"))
        added = int(self.system_prompt is not None)
        check_chat(engine.tokenizer, messages, tools, added=added)
        renderer = TemplateRenderer(engine.tokenizer, **self.template)
        return [Conversation(renderer, messages, tools=tools) for _ in range(count)]

    async def _converse(
        self,
        engine: InferenceEngine,
        data: dict[str, Any],
        chat: Conversation,
        response: LLMResponse,
    ) -> Trajectory:
        prompt = engine.tokenizer.decode(chat.input_ids)
        turns = 0
        while True:
            prompt_ids = response.input_tokens
            reply = chat.add_response(response)
            turns += 1
            [reward] = await engine.score(
                self.reward_fn,
                completions=[reply.text],
                data=data,
                prompt=prompt,
                prompt_ids=prompt_ids,
                completion_ids=[response.output_tokens],
            )
            if reward > 0 or turns == self.max_turns:
                break
            said = self.feedback
            if not isinstance(said, str):
                said = said(reply.text, reward, **data)
            chat.add_messages({"role": "user", "content": said})
            try:
                response = await engine.agenerate(LLMRequest(chat.input_ids, self.gconfig))
            except InvalidInput:  # the context is full: the answers that there are count
                break
        return chat.trajectory(reward * self.turn_discount ** (turns - 1))


def row_messages(data: dict[str, Any], system_prompt: str | None) -> list[Message]:
    """Returns a row's opening messages: its `messages`, or its `prompt` as a user's message.

    Raises:
        InvalidInput: It has neither.
    """
    messages, prompt = data.get("messages"), data.get("prompt")
    if messages is None and isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    if not isinstance(messages, list) or not messages:
        raise InvalidInput(
            f"data: expected 'messages' (a list) or 'prompt' (a string), "
            f"got the fields {sorted(data)}"
        )
    system: list[Message] = []
    if system_prompt is not None:
        system = [{"role": "system", "content": system_prompt}]
    return [*system, *messages]

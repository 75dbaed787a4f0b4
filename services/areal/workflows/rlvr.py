"""Reinforcement learning with verifiable rewards: one prompt, n samples, one score each."""

from __future__ import annotations

from typing import Any

from areal.errors import InvalidInput
from areal.images import image_files, row_images
from areal.rewards import BUILTIN, builtin_reward
from areal.tokenizer.chat_contents import check_chat
from areal.types import GenerationHyperparameters, LLMRequest, Trajectory
from areal.workflows.answer_text import AnswerText
from areal.workflows.base import InferenceEngine, RewardFn, RolloutWorkflow, make_trajectory
from areal.workflows.large_text import apart, size_of


class RLVRWorkflow(RolloutWorkflow):
    """Samples `gconfig.n_samples` answers to each row and scores them.

    A row has `messages` (a list of {"role", "content"}) or `prompt` (a user's message), and may
    have `tools` (JSON schemas), which the model sees as its chat template shows them. The reward
    function gets all of the row's fields except `images` as keyword arguments. Images are placed
    before the text of `prompt`, or where `messages` contains {"type": "image"}.

    Example:
        >>> RLVRWorkflow("math", GenerationHyperparameters(n_samples=8, max_new_tokens=256))
    """

    def __init__(
        self,
        reward_fn: RewardFn = "math",
        gconfig: GenerationHyperparameters | None = None,
        system_prompt: str | None = None,
        reward_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Checks and stores the arguments.

        Args:
            reward_fn: The name of a built-in reward, or a function of the recipe,
                `reward_fn(prompt, completions, prompt_ids, completion_ids, **data) -> float`. The
                function is called once per answer: `prompt` is the whole prompt as text, and
                `completions` is the text of one answer without special tokens. A function
                marked with `group_reward` gets all answers of a group at once.
            gconfig: Sampling parameters. None means the defaults of `GenerationHyperparameters`.
            system_prompt: Text of a system message, placed before the row's messages.
            reward_kwargs: Additional keyword arguments for the reward; "regex" needs `pattern`.

        Raises:
            InvalidInput: `gconfig.n_samples` is below 1, or `reward_fn` is neither the name of a
                built-in reward nor a function.
        """
        self.reward_fn = reward_fn
        self.gconfig = gconfig or GenerationHyperparameters()
        self.system_prompt = system_prompt
        self.reward_kwargs = reward_kwargs or {}
        if isinstance(reward_fn, str) and reward_fn not in BUILTIN:
            builtin_reward(reward_fn)  # raises, and names the nearest one
        if not isinstance(reward_fn, str) and not callable(reward_fn):
            raise InvalidInput(f"reward_fn {reward_fn!r}: expected a name or a function")
        if self.gconfig.n_samples < 1:
            raise InvalidInput(f"gconfig.n_samples {self.gconfig.n_samples}: expected 1 or more")

    def prompt_ids(self, engine: InferenceEngine, data: dict[str, Any]) -> list[int]:
        """Returns the token ids of a row's prompt, in the model's chat format if it has one.

        Raises:
            InvalidInput: The row has no `messages` and no `prompt`, they are malformed, or the chat
                template has no place for a part of them or for the row's `tools`.
        """
        messages = data.get("messages")
        if messages is None:
            prompt = data.get("prompt")
            if not isinstance(prompt, str):
                raise InvalidInput(
                    f"data: expected 'messages' (a list) or 'prompt' (a string), "
                    f"got the fields {sorted(data)}"
                )
            if not engine.tokenizer.chat_template:
                if data.get("tools"):
                    raise InvalidInput("tools: this tokenizer has no chat template to show them")
                return engine.tokenizer.encode((self.system_prompt or "") + prompt)
            seen = [{"type": "image"} for _ in row_images(data)]
            content = [*seen, {"type": "text", "text": prompt}] if seen else prompt
            messages = [{"role": "user", "content": content}]
        if self.system_prompt is not None:
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        tools = data.get("tools")
        added = int(self.system_prompt is not None)
        check_chat(engine.tokenizer, messages, tools, added=added)
        return engine.tokenizer.apply_chat_template(messages, tools=tools)

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> list[Trajectory]:
        """Returns one group: a trajectory for each of `n_samples` answers to one row."""
        given = data.get("messages")
        size = size_of(given if isinstance(given, list) else [{"content": data.get("prompt")}])
        input_ids = await apart(size, self.prompt_ids, engine, data)
        request = LLMRequest(input_ids, self.gconfig, images=image_files(data))
        responses = await engine.agenerate_group(request)
        as_text = AnswerText(engine.tokenizer)
        texts = [as_text.of(response.output_tokens) for response in responses]
        rewards = await engine.score(
            self.reward_fn,
            completions=texts,
            data={name: value for name, value in data.items() if name != "images"},
            prompt=engine.tokenizer.decode(input_ids),
            prompt_ids=input_ids,
            completion_ids=[r.output_tokens for r in responses],
            kwargs=self.reward_kwargs,
        )
        return [
            make_trajectory(response, reward, text)
            for response, reward, text in zip(responses, rewards, texts, strict=True)
        ]

"""A workflow is one method that turns a dataset row into trajectories.

A whole workflow, as a recipe writes it:

    class TwoTries(RolloutWorkflow):
        def __init__(self, reward_fn, gconfig: GenerationHyperparameters):
            self.reward_fn, self.gconfig = reward_fn, gconfig

        async def arun_episode(self, engine, data):
            chat = Conversation(engine.tokenizer, [{"role": "user", "content": data["question"]}])
            for _ in range(2):
                response = await engine.agenerate(LLMRequest(chat.input_ids, self.gconfig))
                reply = chat.add_response(response)
                [reward] = await engine.score(self.reward_fn, data=data, completions=[reply.text])
                if reward > 0:
                    break
                chat.add_messages({"role": "user", "content": "That is wrong, try again."})
            return chat.trajectory(reward)

An instance is built once per description in each rollout worker and serves all its episodes at
once, so it keeps nothing of an episode on `self`.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import numpy as np
import numpy.typing as npt

from areal.errors import PromptDrift, WorkflowError
from areal.types import LLMRequest, LLMResponse, Trajectory

if TYPE_CHECKING:
    from areal.tokenizer import Tokenizer

# A built-in reward's name ("math"), or a function of the recipe:
# reward_fn(prompt, completions, prompt_ids, completion_ids, **data) -> float
RewardFn = str | Callable[..., Any]


class InferenceEngine(Protocol):
    """Generates and scores answers for one episode; `arun_episode` gets one as `engine`."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model being trained."""
        ...

    async def agenerate(self, request: LLMRequest) -> LLMResponse:
        """Returns one answer, continued automatically after a weight update or server failure.

        Raises:
            InvalidInput: The request is too long for the model, or a token id is out of range.
            Unavailable: Servers failed repeatedly; the message names each failure.
            WaitTimeout: No server had a recent enough policy version within
                `rollout.setup_timeout_s`, or the answer was not finished within
                `rollout.request_timeout_s`.
        """
        ...

    async def agenerate_group(self, request: LLMRequest) -> list[LLMResponse]:
        """Returns `request.gconfig.n_samples` answers to one prompt, from one call to a server.

        Apart from the number of answers, the method works like `agenerate` and raises the same
        errors. After an interruption, each answer continues from its own tokens.
        """
        ...

    async def score(
        self,
        reward_fn: RewardFn,
        *,
        completions: Sequence[str],
        data: dict[str, Any],
        prompt: str = "",
        prompt_ids: Sequence[int] = (),
        completion_ids: Sequence[Sequence[int]] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[float]:
        """Returns the reward of each completion, from one call to the reward service.

        Args:
            reward_fn: The name of a built-in reward, or a function of the recipe.
            completions: The texts to score, all for the same row.
            data: The row, whose fields the function gets as keyword arguments.
            prompt: The prompt as text.
            prompt_ids: Token ids of the prompt.
            completion_ids: Token ids of each completion.
            kwargs: Additional keyword arguments, such as the options of a built-in reward.

        Returns:
            One reward per completion, in order.

        Raises:
            WorkflowError: The function raised an error, exceeded its time limit, or did not return
                a finite number.
            Unavailable: The reward worker died, or the service does not answer. If the workflow
                does not catch this error, the task is tried again.
        """
        ...


class RolloutWorkflow(ABC):
    """Base class of all workflows; a subclass implements `arun_episode`.

    The trainer records the constructor's arguments, and each rollout worker recreates the workflow
    from them. Therefore the arguments must be JSON values, dataclasses, or module-level functions
    or classes of the recipe. A worker uses one object for all of its concurrent episodes, so do not
    store an episode's state in it. Set the class variable `replayable = False` if a rerun of an
    interrupted episode would not make the same model calls, for example because of a clock,
    randomness, or tools with side effects.
    """

    replayable: ClassVar[bool] = True
    """Whether an interrupted episode may be rerun on the recorded answers of its finished model
    calls. Set it to False when a rerun would not make the same calls (clock, randomness, tools
    with side effects): such an episode starts over."""

    _areal_arguments: dict[str, Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = super().__new__(cls)
        bound = inspect.signature(cls.__init__).bind(self, *args, **kwargs)
        arguments = dict(bound.arguments)
        arguments.pop(next(iter(arguments)))  # self
        for name, parameter in inspect.signature(cls.__init__).parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                arguments.update(arguments.pop(name, {}))
        self._areal_arguments = arguments
        return self

    @abstractmethod
    async def arun_episode(
        self, engine: InferenceEngine, data: dict[str, Any]
    ) -> list[Trajectory] | Trajectory | None:
        """Returns the trajectories of one task.

        Args:
            engine: Generates and scores answers, and has the tokenizer.
            data: The dataset row.

        Returns:
            The task's trajectories; the rollout worker sets their `trajectory_id`. None rejects the
            task, which is then neither trained on nor tried again.
        """

    def prompt_ids(self, engine: InferenceEngine, data: dict[str, Any]) -> list[int] | None:
        """Returns the token ids of a row's first prompt; None if only an episode can tell.

        The trainer asks for them before its first step, to refuse rows that no server would take.

        Args:
            engine: Only its `tokenizer` can be used.
            data: The dataset row.

        Raises:
            InvalidInput: The row is malformed.
        """
        return None


def make_trajectory(
    responses: LLMResponse | Sequence[LLMResponse],
    reward: float | Sequence[float],
    completion_text: str = "",
) -> Trajectory:
    """Returns a trajectory with one or more turns; the loss covers exactly the sampled tokens.

    Args:
        responses: The model's answers, in order. Each prompt must begin with the previous prompt
            and output; `areal.Conversation` builds such prompts. The tokens that a prompt adds (a
            user's reply, a tool's result) are context and have no loss.
        reward: One number for the whole trajectory, placed on the last sampled token; or one number
            per response, each placed on that response's last token.
        completion_text: Text for display, such as the last answer; may be empty.

    Returns:
        A trajectory whose length L is the length of the last prompt plus that of the last output.
        The rollout worker sets its `trajectory_id`.

    Raises:
        PromptDrift: A prompt does not begin with the previous prompt and output.
        WorkflowError: No token was sampled, the number of rewards is neither 1 nor the number of
            responses, or a response without tokens has a reward other than 0.
    """
    turns = [responses] if isinstance(responses, LLMResponse) else list(responses)
    context: list[int] = []
    for index, turn in enumerate(turns):
        prompt = list(turn.input_tokens)
        if prompt[: len(context)] != context:
            raise PromptDrift(
                f"make_trajectory: the prompt of response {index} does not begin with the prompt "
                f"and output of response {index - 1}: tokenizing text again may give ids other "
                f"than those sampled; build the prompts with areal.Conversation, which only appends"
            )
        context = [*prompt, *turn.output_tokens]
    placed = [(len(turn.input_tokens), turn) for turn in turns]
    return assemble_trajectory(context, placed, reward, completion_text)


def assemble_trajectory(
    ids: Sequence[int],
    turns: Sequence[tuple[int, LLMResponse]],
    reward: float | Sequence[float],
    completion_text: str,
) -> Trajectory:
    """Returns the arrays of `make_trajectory`, from ids that are known to hold each output.

    Args:
        ids: Token ids of the whole trajectory.
        turns: (index in `ids` of the first output token, response), in order.
        reward: One number, or one per response.
        completion_text: The text that people see.

    Raises:
        WorkflowError: No token was sampled, the number of rewards is wrong, or a response without
            tokens has a reward other than 0.
    """
    if not any(turn.output_tokens for _, turn in turns):
        raise WorkflowError("make_trajectory: no token was sampled")
    rewards_of = [float(reward)] if isinstance(reward, (int, float)) else [float(r) for r in reward]
    if len(rewards_of) not in {1, len(turns)}:
        raise WorkflowError(
            f"make_trajectory: {len(rewards_of)} rewards for {len(turns)} responses: "
            f"expected one for the trajectory, or one per response"
        )
    length = len(ids)
    loss_mask = np.zeros(length, dtype=np.bool_)
    logprobs = np.zeros(length, dtype=np.float32)
    versions = np.full(length, -1, dtype=np.int32)
    rewards = np.zeros(length, dtype=np.float32)
    for index, (start, turn) in enumerate(turns):
        end = start + len(turn.output_tokens)
        loss_mask[start:end] = True
        logprobs[start:end] = turn.output_logprobs
        versions[start:end] = turn.output_versions
        if len(rewards_of) > 1 and end > start:
            rewards[end - 1] = rewards_of[index]
        elif len(rewards_of) > 1 and rewards_of[index] != 0.0:
            raise WorkflowError(
                f"make_trajectory: reward {rewards_of[index]} of response {index}: it has no token "
                "that could get the reward: expected 0, or one reward for the trajectory"
            )
    if len(rewards_of) == 1:
        rewards[np.flatnonzero(loss_mask)[-1]] = rewards_of[0]
    return Trajectory(
        trajectory_id="",
        input_ids=np.array(ids, dtype=np.int32),
        loss_mask=loss_mask,
        behavior_logprobs=logprobs,
        token_versions=versions,
        rewards=rewards,
        finish_reason=turns[-1][1].stop_reason,
        completion_text=completion_text,
        images=turns[-1][1].images,
        reward_parts=_parts([reward] if isinstance(reward, (int, float)) else reward),
        generation_s=sum(turn.latency_s for _, turn in turns),
        servers=tuple(dict.fromkeys(server for _, turn in turns for server in turn.servers)),
        routed_experts=_routes([turn for _, turn in turns]),
    )


def _routes(turns: Sequence[LLMResponse]) -> npt.NDArray[Any] | None:
    """The experts of the first tokens; of a token, those of the call that sampled or read it first.

    Each prompt begins with the previous prompt and output, so calls tell of the same tokens.
    """
    parts: list[npt.NDArray[Any]] = []
    known = 0
    for turn in turns:
        routes = turn.routed_experts
        if routes is None or (parts and routes.shape[1:] != parts[0].shape[1:]):
            continue
        # An answer may have been cut after it was sampled.
        own = routes[known : len(turn.input_tokens) + len(turn.output_tokens)]
        if len(own):
            parts.append(own)
            known += len(own)
    return np.concatenate(parts) if parts else None


def _parts(rewards: Sequence[float]) -> dict[str, float]:
    """Returns the parts of all rewards together."""
    found: dict[str, float] = {}
    for reward in rewards:
        for name, value in getattr(reward, "parts", {}).items():  # of areal.rubric
            found[name] = found.get(name, 0.0) + value
    return found

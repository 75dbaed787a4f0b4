"""The vocabulary shared by recipes, workflows and services. No torch, no grpc here.

Alignment: every per-token array of a trajectory has the full length L of `input_ids`; index t
describes token t itself (its behavior logprob is the logprob of token t given the tokens before).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt, Le


class TaskState(StrEnum):
    """The ten states of a task; the counters of all of them add up to the number submitted."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    BATCHED = "batched"
    TRAINED = "trained"
    DELIVERED = "delivered"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    DEAD_LETTERED = "dead_lettered"

    @property
    def live(self) -> bool:
        """Whether the task may still change state."""
        return self in LIVE_STATES


LIVE_STATES = frozenset(
    {TaskState.QUEUED, TaskState.RUNNING, TaskState.COMPLETED, TaskState.BATCHED}
)


class Purpose(StrEnum):
    """Why a task is run."""

    TRAIN = "train"
    """Consumed by a trainer's batch; bound by the staleness rules."""
    SERVE = "serve"
    """Evaluation and external clients; ends `delivered`."""


class StopReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """A stop token was sampled (it is the last output token)."""
    LENGTH = "length"
    """max_new_tokens or the context was reached."""
    ABORT = "abort"
    """Interrupted for good (the caller's deadline)."""
    TOOL_CALLS = "tool_calls"
    """Stopped to call a tool."""


@dataclass
class GenerationHyperparameters:
    """Sampling parameters of a generation."""

    n_samples: Annotated[int, Ge(1)] = 1
    """Number of samples per task, which is the size of the group."""
    max_new_tokens: Annotated[int, Ge(1)] = 512
    """Maximum number of tokens per sample."""
    min_new_tokens: int = field(default=0, metadata={"omegaconf_ignore": True})
    """No stop token is sampled before this many tokens. Set it in a workflow; it is not a
    configuration key."""
    temperature: float = 1.0
    """Sampling temperature; 0 means greedy, which is for evaluation only. Logprobs are those of the
    distribution at this temperature, both in sampling and in training."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Nucleus sampling; 1 turns it off. Logprobs are still those of the whole distribution, so
    training ignores the truncation, and the run starts with a warning."""
    top_k: int = -1
    """Top-k sampling; -1 turns it off. As with `top_p`, training ignores the truncation, and the
    run starts with a warning."""
    greedy: bool = field(default=False, metadata={"omegaconf_ignore": True})
    """The same as temperature 0. Set it in a workflow; it is not a configuration key."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Ids of tokens that end a sample, in addition to the model's end-of-sequence tokens."""


@dataclass(frozen=True)
class LLMRequest:
    """A prompt with its sampling parameters, for `agenerate` or `agenerate_group`.

    Example:
        >>> LLMRequest(input_ids=[257, 49, 50, 258], gconfig=GenerationHyperparameters())
    """

    input_ids: list[int]
    """Token ids of the prompt."""
    gconfig: GenerationHyperparameters
    """Sampling parameters. `agenerate` ignores `n_samples`: it returns one answer."""
    rid: str = ""
    """A name that becomes part of the request's id on the server; may be empty."""
    affinity_key: str = ""
    """Requests with the same key go to the same server if possible, to reuse its prefix cache."""
    images: tuple[bytes, ...] = ()
    """Contents of the prompt's image files (PNG, JPEG, WebP), in order. Each image is one token of
    `input_ids`."""
    grammar: str = ""
    """A constraint on the answer, as a structural tag (JSON) of SGLang and xgrammar; empty means
    none. Only tokens that the constraint allows are sampled, and logprobs are those of the
    distribution over the allowed tokens. An interrupted answer starts over."""
    on_tokens: Callable[[int, Sequence[int]], None] | None = field(
        default=None, compare=False, repr=False
    )
    """Called during sampling with an answer's index in the group and its token ids so far."""


@dataclass
class LLMResponse:
    """The answer to a request, possibly sampled by several servers and policy versions.

    Example:
        >>> response.output_tokens, response.output_versions, response.stop_reason
        ([52, 54, 260], [3, 3, 4], StopReason.STOP)
    """

    input_tokens: list[int]
    """Token ids of the prompt."""
    output_tokens: list[int]
    """Token ids of the answer, including the stop token if one ended it."""
    output_logprobs: list[float]
    """Logprob of each output token under the weights that sampled it."""
    output_versions: list[int]
    """Policy version that sampled each output token."""
    stop_reason: StopReason
    """Why the answer ended."""
    latency_s: float = 0.0
    """Seconds from the call to the end of the answer, including interruptions."""
    interruptions: int = 0
    """How many times the answer was continued after an abort, a drain, or a server failure."""
    images: tuple[bytes, ...] = ()
    """The images of the request."""
    servers: list[str] = field(default_factory=list)
    """URLs of the servers that sampled the output tokens, in order of first use."""
    routed_experts: npt.NDArray[Any] | None = field(default=None, compare=False, repr=False)
    """The experts that servers chose for the first tokens of prompt and answer, uint8 or uint16
    [tokens, layers, experts of a token]; the last token has none. None: no server said."""


TIMEOUTS = "timeouts"
"""Part of a reward: 1 where judging an answer took too long and it therefore scored 0."""


SPLITS = "splits"
"""Part of a reward: 1 for a trajectory that repeats the history of an earlier one of its attempt,
which it does not continue, since the agent changed the history."""


SPLIT_FIELDS = (
    "role",
    "content",
    "tool_calls",
    "tool_calls.function.name",
    "tool_calls.function.arguments",
    "tools",
    "chat_template_kwargs",
    "prompt",
)
"""The fields of `split_field`; `prompt` stands for all that has no message."""


def split_field(split: str) -> str:
    """Returns the field of `Trajectory.split`: without the numbers of message and call."""
    field = re.sub(r"\[\d+\]", "", split).removeprefix("messages.")
    return field if field in SPLIT_FIELDS else "prompt"


def split_message(split: str) -> int | None:
    """Returns the number of the message in `Trajectory.split`."""
    found = re.match(r"messages\[(\d+)\]", split)
    return int(found[1]) if found else None


class Score(float):
    """A reward together with its parts.

    Example:
        >>> Score(1.1, {"correct": 1.0, "short": 0.5}).parts["correct"]
        1.0
    """

    parts: dict[str, float]

    def __new__(cls, value: float, parts: Mapping[str, float] | None = None) -> Self:
        """A number with the parts that it is made of, before weights."""
        self = super().__new__(cls, value)
        self.parts = dict(parts or {})
        return self

    def __mul__(self, factor: float) -> Score:
        """A weighted or discounted reward has the same parts."""
        return Score(float(self) * factor, self.parts)

    __rmul__ = __mul__


@dataclass(frozen=True)
class McpServer:
    """A tool server that uses the Model Context Protocol (MCP). Set either `command` or `url`."""

    command: list[str] = field(default_factory=list)
    """The program and its arguments. Each conversation starts its own process and talks to it
    through standard input and output."""
    url: str = ""
    """URL of a server that is already running and uses the transport "streamable HTTP"."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables for the program, in addition to the worker's PATH, HOME and the like.
    The variables are stored with the task, so do not put secrets here."""


@dataclass(frozen=True)
class WorkflowSpec:
    """How a worker rebuilds a workflow object: by digest and name, never pickled."""

    name: str
    """Class name in the recipe, or a built-in name ("rlvr")."""
    recipe_digest: str = ""
    """sha256 hex of the recipe's source; empty for a built-in."""
    kwargs_json: str = "{}"
    """JSON object; a function is {"$function": "qualified_name"}."""


@dataclass(frozen=True)
class Task:
    """One dataset row submitted for rollout, with all its samples."""

    task_id: str
    purpose: Purpose
    workflow: WorkflowSpec
    data: dict[str, Any]
    """The row; JSON types only."""
    position: tuple[int, int] | None = None
    """(epoch, index) in the dataset; None for tasks from elsewhere."""
    time_to_live_s: float | None = None
    traceparent: str = ""
    policy_version: int | None = None
    """The version that must sample every token (SERVE only); None: any admissible one."""


@dataclass
class Trajectory:
    """The record of one sample: its token ids, loss mask, logprobs, versions and rewards.

    Each array has one entry per token, L in all; index t describes token t.

    Example:
        >>> t.input_ids.tolist(), t.loss_mask.tolist(), t.token_versions.tolist()
        ([257, 49, 52, 260], [False, False, True, True], [-1, -1, 3, 4])
    """

    trajectory_id: str
    """Unique id; the rollout worker sets it."""
    input_ids: npt.NDArray[np.int32]
    """Token ids of the prompt, the answers, and the context between them."""
    loss_mask: npt.NDArray[np.bool_]
    """True on the sampled tokens that this trajectory's loss covers; False on all others: prompts,
    tool results, and answers that are already covered by the loss of another trajectory of the
    same agent run."""
    behavior_logprobs: npt.NDArray[np.float32]
    """Logprob of each token under the weights that sampled it; 0 where `loss_mask` is False."""
    token_versions: npt.NDArray[np.int32]
    """Policy version that sampled each token; -1 where `loss_mask` is False."""
    rewards: npt.NDArray[np.float32]
    """Reward of each token. A single reward for the whole sample is on the last sampled token."""
    finish_reason: StopReason = StopReason.STOP
    """Why the last answer ended."""
    completion_text: str = ""
    """Text for display: the last answer, unless the workflow passes another text."""
    images: tuple[bytes, ...] = ()
    """Contents of the prompt's image files, in order; each image is one token of `input_ids`. All
    trajectories of a group have the same images."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """The parts of the reward before weighting (see `areal.rubric`). They become metrics."""
    generation_s: float = 0.0
    """Seconds that the answers took, including interruptions."""
    servers: tuple[str, ...] = ()
    """URLs of the servers that sampled the tokens."""
    split: str = ""
    """Which message and field of an agent's history changed, such as `messages[0].content`, so that
    the trajectory does not continue an earlier one of its attempt; "" if none did."""
    routed_experts: npt.NDArray[Any] | None = None
    """The experts that servers chose for its first tokens, uint8 or uint16 [tokens, layers, experts
    of a token], which the policy's forward passes replay. None: they choose themselves."""

    @property
    def reward(self) -> float:
        """The sum of `rewards`."""
        return float(self.rewards.sum())

    @property
    def head_version(self) -> int:
        """The smallest policy version that sampled a token; -1 if no token was sampled."""
        sampled = self.token_versions[self.token_versions >= 0]
        return int(sampled.min()) if sampled.size else -1


@dataclass
class TrajectoryGroup:
    """The trajectories of one task, usually `n_samples` of them: the queue's unit."""

    task_id: str
    trajectories: list[Trajectory]
    traceparent: str = ""
    queued_s: float = 0.0
    """Seconds from its submission, or from the end of an earlier attempt, to its lease."""
    episode_s: float = 0.0
    """Seconds that the workflow ran."""
    score_s: float = 0.0
    """Seconds that it waited for rewards; the times of concurrent calls are added up."""

    @property
    def images(self) -> tuple[bytes, ...]:
        """The images of its prompt, which all trajectories share."""
        return self.trajectories[0].images

    @property
    def head_version(self) -> int:
        """Smallest head version of its trajectories."""
        return min(t.head_version for t in self.trajectories)


@dataclass(frozen=True)
class WeightUpdateMeta:
    """Names the transport that carries new weights from the trainer to the inference servers."""

    type: str = ""
    """A transport of docs/weight-sync.md; empty means the value of `weight_sync.transport`."""
    path: str = ""
    """Where versions are published; empty means the value of `weight_sync.path`."""

    @classmethod
    def from_disk(cls, path: str = "") -> WeightUpdateMeta:
        """Returns the transport `disk` with a path; without one, the configured transport and path.

        Args:
            path: A folder that all servers can read, or "".
        """
        return cls(type="disk" if path else "", path=path)

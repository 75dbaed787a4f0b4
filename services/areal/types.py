"""The vocabulary shared by recipes, workflows and services. No torch, no grpc here.

Alignment: every per-token array of a trajectory has the full length L of `input_ids`; index t
describes token t itself (its behavior logprob is the logprob of token t given the tokens before).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any, Self

import numpy as np
import numpy.typing as npt
from annotated_types import Ge


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
    """Sampling parameters."""

    n_samples: Annotated[int, Ge(1)] = 1
    """Samples per task, that is, the size of its group."""
    max_new_tokens: Annotated[int, Ge(1)] = 512
    """Maximum number of tokens per sample."""
    min_new_tokens: int = field(default=0, metadata={"omegaconf_ignore": True})
    """Stop tokens are masked until this many tokens are sampled. A workflow sets it."""
    temperature: float = 1.0
    """0 means greedy, which is for evaluation only. Logprobs are those of the temperature-scaled
    distribution; training compares them at this temperature."""
    top_p: float = 1.0
    """Nucleus sampling; 1 turns it off. Logprobs are still those of the whole distribution, so
    training does not see the truncation: the run starts with a warning."""
    top_k: int = -1
    """Top-k sampling; -1 turns it off. Logprobs and the warning are the same as with `top_p`."""
    greedy: bool = field(default=False, metadata={"omegaconf_ignore": True})
    """Same as temperature 0. A workflow sets it."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Tokens that end a sample, in addition to the model's end-of-sequence token."""


@dataclass(frozen=True)
class LLMRequest:
    """A request for one answer to one prompt, or for a group of them.

    Example:
        >>> LLMRequest(input_ids=[257, 49, 50, 258], gconfig=GenerationHyperparameters())
    """

    input_ids: list[int]
    """Token ids of the prompt."""
    gconfig: GenerationHyperparameters
    """How to sample; `agenerate` gives one answer, `agenerate_group` gives `n_samples`."""
    rid: str = ""
    """Unique id; the engine makes one when empty."""
    affinity_key: str = ""
    """Requests with the same key go to the same server when possible (prefix cache)."""
    images: tuple[bytes, ...] = ()
    """Files of the prompt's images (PNG, JPEG, WebP), in order; each is one token of the prompt."""
    grammar: str = ""
    """What an answer may be: a structural tag (JSON) as SGLang and xgrammar define it. Empty:
    anything. Only tokens that it allows are sampled, and logprobs are those of the distribution
    over these tokens."""
    on_tokens: Callable[[int, Sequence[int]], None] | None = field(
        default=None, compare=False, repr=False
    )
    """Called during sampling with the index of an answer and all its token ids so far."""


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
    """Token ids of the answer, a stop token included."""
    output_logprobs: list[float]
    """Behavior logprob of each output token."""
    output_versions: list[int]
    """Policy version that sampled each output token."""
    stop_reason: StopReason
    latency_s: float = 0.0
    """Seconds from the call to the answer, interruptions included."""
    interruptions: int = 0
    """Times the request was continued after an abort, drain or dead server."""
    images: tuple[bytes, ...] = ()
    """The images of the request."""
    servers: list[str] = field(default_factory=list)
    """URLs of the servers that sampled its tokens, in the order in which they began."""


class Score(float):
    """A reward that knows its parts.

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
    """A server of the Model Context Protocol: either a program or a URL."""

    command: list[str] = field(default_factory=list)
    """The program and its arguments; it speaks on its standard input and output. Each conversation
    has a process of its own. It sees PATH, HOME and the like of the worker, and `environment`."""
    url: str = ""
    """Of a server that runs already (streamable HTTP)."""
    environment: dict[str, str] = field(default_factory=dict)
    """More variables for the program. They are stored with the task: no secrets."""


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
    """The immutable record of one sample; arrays are aligned, all of length L.

    Example:
        >>> t.input_ids, t.loss_mask, t.token_versions
        (array([257, 49, 52, 260]), array([0, 0, 1, 1], bool), array([-1, -1, 3, 4]))
    """

    trajectory_id: str
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    behavior_logprobs: npt.NDArray[np.float32]
    """0 where loss_mask is False."""
    token_versions: npt.NDArray[np.int32]
    """-1 on tokens that the policy did not sample."""
    rewards: npt.NDArray[np.float32]
    """Token-aligned; a single outcome sits on the last generated token."""
    finish_reason: StopReason = StopReason.STOP
    completion_text: str = ""
    images: tuple[bytes, ...] = ()
    """Files of the images of its prompt, in order; each is one token of `input_ids`. All
    trajectories of a group have the same images."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """The parts of its reward before weighting (`areal.rubric`); for people and metrics."""
    generation_s: float = 0.0
    """Seconds that its answers took, interruptions included."""
    servers: tuple[str, ...] = ()
    """URLs of the servers that sampled its tokens."""

    @property
    def reward(self) -> float:
        """Sum of the token rewards."""
        return float(self.rewards.sum())

    @property
    def head_version(self) -> int:
        """Smallest version that sampled a token; -1 if none was sampled."""
        sampled = self.token_versions[self.token_versions >= 0]
        return int(sampled.min()) if sampled.size else -1


@dataclass
class TrajectoryGroup:
    """The `n_samples` trajectories of one task: the queue's unit."""

    task_id: str
    trajectories: list[Trajectory]
    traceparent: str = ""
    queued_s: float = 0.0
    """Seconds from its submission, or from the end of an earlier attempt, to its lease."""
    episode_s: float = 0.0
    """Seconds that the workflow ran."""
    score_s: float = 0.0
    """Seconds that it waited for rewards; calls at the same time add up."""

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
    """How new weights reach the inference servers."""

    type: str = ""
    """disk, stream or distributed; empty: `weight_sync.transport`."""
    path: str = ""
    """For disk: the root folder of published versions; empty: the run's own."""

    @classmethod
    def from_disk(cls, path: str = "") -> WeightUpdateMeta:
        """Publishes weights below `path`, a folder that all servers can read; "": as configured."""
        return cls(type="disk" if path else "", path=path)

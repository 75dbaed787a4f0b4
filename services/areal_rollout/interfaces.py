"""What the core needs of the outside; each is satisfied by the class named."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping, Sequence
from typing import Any, Protocol

from areal.protocol.leases import Lease, Return
from areal.protocol.scores import ScoreFailure, ScoreItem
from areal.types import LLMRequest, LLMResponse, Trajectory, TrajectoryGroup, WorkflowSpec
from areal.workflows.base import RolloutWorkflow


class Buffer(Protocol):
    """Where leases come from and groups go to (`areal.clients.buffer.worker.BufferWorker`)."""

    async def lease_tasks(
        self, worker_id: str, max_tasks: int, max_wait_s: float, *, boot: int
    ) -> tuple[list[Lease], str]:
        """Leases, or why there are none."""
        ...

    async def renew_leases(
        self, worker_id: str, leases: Sequence[tuple[str, int]]
    ) -> Collection[str]:
        """Returns the leases that were lost."""
        ...

    async def complete_task(
        self, task_id: str, token: int, group: TrajectoryGroup, worker_id: str
    ) -> bool:
        """Completes a task with its group."""
        ...

    async def reject_task(
        self, task_id: str, token: int, reason: str, group: TrajectoryGroup | None
    ) -> None:
        """Reports that the task is dropped, with what its workflow made."""
        ...

    def return_task(self, task_id: str, token: int, end: Return) -> Awaitable[object]:
        """Returns a lease; those of many leave in the order of the calls."""
        ...


class Workflows(Protocol):
    """Finds workflows, as `WorkflowCache` does."""

    async def get(self, spec: WorkflowSpec) -> RolloutWorkflow:
        """Returns the workflow of a description."""
        ...


class Observer(Protocol):
    """Receives figures, as `RolloutMetrics` does."""

    def episode_ended(self, outcome: str) -> None:
        """Counts an episode that has ended."""

    def busy(self, seconds: float) -> None:
        """Adds time in which at least one episode was running."""

    def waited(self, reason: str, seconds: float) -> None:
        """Adds time in which no task could be leased."""

    def replayed(self, tokens: int) -> None:
        """Counts tokens that came from a journal."""

    def dropped_answers(self, count: int) -> None:
        """Counts answers of sessions that were not used, since their requests were repeated."""

    def conversations_split(self, trajectories: Sequence[Trajectory]) -> None:
        """Counts those that do not continue an earlier one, by the field that changed."""

    def agent_call_bug(self) -> None:
        """Counts an agent's call that failed with an unexpected exception."""

    def drifted(self) -> None:
        """Counts a lost episode: a later prompt did not begin with the tokens before it."""


class Generation(Protocol):
    """Generates for all episodes of the process (`generation.client.SGLangClient`)."""

    async def generate(
        self,
        request: LLMRequest,
        responses: Sequence[LLMResponse],
        *,
        min_version: int,
        avoid: Collection[str],
    ) -> None:
        """Completes those of the answers to a request that have not ended."""
        ...

    async def wait_ready(self, timeout: float) -> bool:
        """Whether any server takes traffic."""
        ...

    async def interrupt(self, timeout: float) -> None:
        """Ends all generation with the tokens there are."""
        ...


class Scorer(Protocol):
    """Scores completions (`areal.clients.reward.RewardClient`)."""

    async def score(
        self,
        spec_name: str,
        recipe_digest: str,
        kwargs: Mapping[str, Any],
        items: Sequence[ScoreItem],
    ) -> list[float | list[float] | ScoreFailure]:
        """Returns one outcome per item, in order."""
        ...

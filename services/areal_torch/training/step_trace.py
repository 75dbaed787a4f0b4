"""The spans of a train step, and of its groups, each in the trace of its own trajectory.

    step    |--- wait_batch ---|- take -|------- train -------|- publish -|
    group     … |-- wait_take -|- take -|------- train -------|- publish -|   … submit, lease

Each step has its own trace, created by rank 0. A group's trace has the same phases, linked to the
step's span, so a trajectory can be followed to its end and a step can be seen as a whole. Each rank
creates the spans of the groups that it trains on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from areal.chassis import tracing
from areal.protocol.leases import Take
from areal.types import TrajectoryGroup

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class StepTrace:
    """Traces one step at a time; every call does nothing if no spans are exported."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._number = 0
        self._step: Span | None = None
        self._phase: Span | None = None
        self._taken_at = 0.0
        # (task id, traceparent) of this rank's groups, and their spans of the phase under way.
        self._groups: list[tuple[str, str]] = []
        self._open: list[Span] = []

    def begin(self, number: int) -> None:
        """Records that step `number` waits for its batch."""
        if not tracing.enabled():
            return
        self.end()
        self._number = number
        if self._rank == 0:
            self._step = tracing.start("step", {"areal.step": number}, root=True)
        self._enter("wait_batch", {})

    def taking(self) -> None:
        """Records that the ledger has handed out the batch."""
        if tracing.enabled():
            self._taken_at = time.time()
            self._enter("take", {})

    def took(self, groups: Sequence[TrajectoryGroup], taken: Take) -> None:
        """Records that this rank has its groups and begins to train on them."""
        if not tracing.enabled():
            return
        self._groups = [(each.task_id, each.traceparent) for each in groups if each.traceparent]
        if not taken.replay:  # else they were not waiting until now
            now = self._taken_at
            since = {each.task_id: min(each.completed_time or now, now) for each in taken.groups}
            for span in self._of_groups("wait_take", {}, since):
                span.end(int(now * 1e9))
        handed_out = dict.fromkeys((task_id for task_id, _ in self._groups), self._taken_at)
        self._open = self._of_groups("take", {"areal.replay": taken.replay}, handed_out)
        self._enter("train", {"areal.groups": len(taken.groups)})

    def publishing(self, version: int) -> None:
        """Records that the new weights are being published."""
        if tracing.enabled():
            self._enter("publish", {"areal.policy_version": version})

    def phase_active(self) -> AbstractContextManager[Any]:
        """Opens a block whose calls belong to the current phase."""
        return tracing.current(self._phase)

    def end(self) -> None:
        """Records the end of the step."""
        self._leave()
        self._groups = []
        if self._step is not None:
            self._step.end()
            self._step = None

    def _enter(self, name: str, attributes: dict[str, Any]) -> None:
        """Ends the phase under way; begins the next one, of the step and of each group."""
        self._leave()
        if self._step is not None:
            parent = tracing.traceparent(self._step)
            self._phase = tracing.start(
                name, attributes | {"areal.step": self._number}, parent=parent
            )
        self._open = self._of_groups(name, attributes, {})

    def _of_groups(
        self, name: str, attributes: dict[str, Any], since: dict[str, float]
    ) -> list[Span]:
        """A span for each group whose trace is sampled; `since`: by task id, if not from now."""
        spans = []
        for task_id, parent in self._groups:
            own = {"areal.task_id": task_id, "areal.step": self._number, "areal.rank": self._rank}
            span = tracing.start(
                name,
                attributes | own,
                parent=parent,
                start_s=since.get(task_id, 0.0),
                links=[self._phase],
            )
            if span is not None:
                spans.append(span)
        return spans

    def _leave(self) -> None:
        for span in self._open:
            span.end()
        self._open = []
        if self._phase is not None:
            self._phase.end()
            self._phase = None

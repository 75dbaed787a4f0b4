"""Held-out rewards: when to measure, the tasks, their mean. Collective, like all batch calls."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from areal import errors
from areal.clients.buffer_reader import MAX_TASKS_PER_CALL
from areal.engines.run_files import MEASURED_AT
from areal.engines.session import TrainerSession
from areal.engines.trainer_status import Evaluation
from areal.types import Purpose, Task, WorkflowSpec

# One long poll; the ranks meet after each, so none idles in a collective for longer.
POLL_S = 10.0


def recorded(session: TrainerSession, name: str, version: int | None) -> float | None:
    """The figure that stands for the policy of now, if there is one; None of another `version`.

    That is one measured at this very step. A run that resumes has moved on from its initial
    policy, so until its first step that one's figure is taken from the record, too.
    """
    known = session.result(name)
    if known is None or version not in (None, session.step):
        return None
    at = (session.result(MEASURED_AT) or {}).get(name, 0)
    began = session.resumed.step if session.resumed else 0
    stands = at == session.step or (at == 0 and session.step == began)
    return float(known) if stands else None


def record(session: TrainerSession, name: str, mean: float) -> float:
    """Keeps a figure and the step it is of; returns the figure."""
    steps = dict(session.result(MEASURED_AT) or {})
    session.record(name, mean)
    session.record(MEASURED_AT, {**steps, name: session.step})
    session.status.evaluated(Evaluation(name, session.step, mean))
    return mean


def pinned(session: TrainerSession, name: str, version: int | None) -> int | None:
    """The version that every token must be of (rank 0); None where servers are ahead.

    Servers go on only when the trainer publishes, which waits for the evaluation: nothing has to
    be held back for it.

    Raises:
        NotFound: Another version than the one that servers are brought to is asked for.
    """
    served = session.served_version
    if version is None:
        return served if served == session.step else None
    if version != served:
        gone = "served no longer" if version < served else "not published yet"
        raise errors.NotFound(
            f"evaluation {name!r}: version {version} is {gone}; servers are brought to {served}"
        )
    return version


def tasks_of(
    session: TrainerSession,
    rows: Sequence[Mapping[str, Any]],
    spec: WorkflowSpec,
    name: str,
    version: int | None,
) -> list[Task]:
    """One task per row."""
    return [
        Task(
            # With the version: another policy's answers are other tasks. Without the incarnation:
            # a resumed run waits for the tasks that are there already.
            task_id=f"{name}-v{session.step if version is None else version}-{index}",
            purpose=Purpose.SERVE,
            workflow=spec,
            data=dict(row),
            policy_version=version,
        )
        for index, row in enumerate(rows)
    ]


def mean_reward(
    session: TrainerSession, tasks: Sequence[Task], name: str, timeout_s: float
) -> float:
    """Waits for the end of all tasks.

    Raises:
        WorkflowError: None was delivered, or too many tasks ended by errors of the recipe.
        WaitTimeout: Some have not ended within `timeout_s`.
    """
    waiting = {task.task_id for task in tasks}
    since = time.monotonic()

    def all_ended() -> bool:
        if waiting:
            waiting.difference_update(
                session.ask_buffer(
                    session.buffer.wait_tasks(
                        sorted(waiting)[:MAX_TASKS_PER_CALL],
                        POLL_S,
                        incarnation=session.incarnation,
                    ),
                    f"evaluation {name!r}",
                )
            )
        if waiting and time.monotonic() - since > timeout_s:
            raise errors.WaitTimeout(
                f"{len(waiting)} of {len(tasks)} tasks of evaluation {name!r}",
                on=f"buffer {session.buffer.address}",
                since=since,
            )
        return not waiting

    while not session.on_rank0(all_ended):
        session.raise_if_stopped()
    return session.on_rank0(lambda: _mean(session, tasks, name, timeout_s))


def _mean(session: TrainerSession, tasks: Sequence[Task], name: str, timeout_s: float) -> float:
    rewards: list[float] = []
    reasons: list[str] = []

    async def read() -> None:
        ids = [task.task_id for task in tasks]
        async for record in session.buffer.read_tasks(ids, include_groups=True):
            reasons.append(record.reason)
            rewards.extend(t.reward for t in (record.group.trajectories if record.group else ()))

    session.ask_buffer(read(), f"results of evaluation {name!r}", timeout_s)
    if not rewards:
        raise errors.WorkflowError(
            f"evaluation {name!r}: none of {len(tasks)} rows was delivered; "
            f"first cause: {reasons[0] if reasons else 'unknown'}"
        )
    return sum(rewards) / len(rewards)

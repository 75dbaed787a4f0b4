"""The task API in JSON: what clients send, and how records and trajectories look."""

from __future__ import annotations

import uuid
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

from areal.errors import InvalidInput
from areal.types import Purpose, Task, WorkflowSpec
from areal.v1 import trajectory_pb2 as pb
from areal.wire import PURPOSE_FROM_PB, STATE_FROM_PB, TRAJECTORY_ARRAYS, array_from_pb, task_to_pb

MAX_TASKS = 10_000


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class WorkflowIn(_Model):
    """How to run the task; the default samples once and scores with "math"."""

    name: str = "rlvr"
    recipe_digest: str = ""
    kwargs: dict[str, Any] = Field(default_factory=dict)


class TaskIn(_Model):
    """One dataset row to run."""

    task_id: str = Field(default="", max_length=200, pattern=r"^[A-Za-z0-9._:-]*$")
    purpose: Literal["serve", "train"] = "serve"
    workflow: WorkflowIn = Field(default_factory=WorkflowIn)
    data: dict[str, Any]
    time_to_live_s: float | None = Field(default=None, gt=0)
    traceparent: str = ""


class SubmitIn(_Model):
    """Body of POST /v1/tasks."""

    tasks: list[TaskIn] = Field(min_length=1, max_length=MAX_TASKS)


class QueryIn(_Model):
    """Body of POST /v1/tasks/query."""

    task_ids: list[str] = Field(min_length=1, max_length=MAX_TASKS)
    include_trajectories: bool = False


class CancelIn(_Model):
    """Body of POST /v1/tasks/cancel."""

    task_ids: list[str] = Field(min_length=1, max_length=MAX_TASKS)
    reason: str = ""


def explain(errors: list[Any], body: Any) -> str:
    """The first validation error as one line that names task, field and value."""
    error = errors[0]
    location = list(error["loc"])
    if location and location[0] in {"body", "query", "path"}:
        location = location[1:]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    path = path.removeprefix(".") or "body"
    if error["type"] == "json_invalid":
        return f"body: not JSON ({error['ctx']['error']})"
    who = ""
    if location[:1] == ["tasks"] and len(location) > 1 and isinstance(body, dict):
        task = body["tasks"][location[1]]
        if isinstance(task, dict) and isinstance(task.get("task_id"), str):
            who = f" (task_id {task['task_id'][:80]!r})"
    if error["type"] == "extra_forbidden":
        return f"{path}{who}: unknown field"
    if error["type"] == "missing":
        return f"{path}{who}: is missing"
    shown = repr(error.get("input"))
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    text = error["msg"][:1].lower() + error["msg"][1:]
    return f"{path}{who} {shown}: {text}"


def task_from_model(model: TaskIn) -> pb.Task:
    """The message of a submitted task; a task without an id gets one."""
    try:
        return task_to_pb(
            Task(
                task_id=model.task_id or f"rest-{uuid.uuid4().hex}",
                purpose=Purpose(model.purpose),
                workflow=WorkflowSpec(
                    name=model.workflow.name,
                    recipe_digest=model.workflow.recipe_digest,
                    kwargs_json=orjson.dumps(model.workflow.kwargs).decode(),
                ),
                data=model.data,
                time_to_live_s=model.time_to_live_s,
                traceparent=model.traceparent,
            )
        )
    except (TypeError, orjson.JSONEncodeError) as error:
        raise InvalidInput(f"task {model.task_id!r}: {error}") from None


def record_json(record: pb.TaskRecord) -> dict[str, Any]:
    """A task record; its group only when the message has one."""
    task = record.task
    result: dict[str, Any] = {
        "task_id": task.task_id,
        "state": STATE_FROM_PB[record.state].value if record.state in STATE_FROM_PB else "",
        "purpose": PURPOSE_FROM_PB[task.purpose].value if task.purpose in PURPOSE_FROM_PB else "",
        "workflow": {
            "name": task.workflow.name,
            "recipe_digest": task.workflow.recipe_digest,
            "kwargs": orjson.loads(task.workflow.kwargs_json or "{}"),
        },
        "data": orjson.loads(task.data_json or "{}"),
        "position": (
            {"epoch": task.position.epoch, "index": task.position.index}
            if task.HasField("position")
            else None
        ),
        "reason": record.reason,
        "attempts": record.attempts,
        "infrastructure_attempts": record.infrastructure_attempts,
        "submit_time": record.submit_time.ToMilliseconds() / 1000,
        "end_time": (
            record.end_time.ToMilliseconds() / 1000 if record.HasField("end_time") else None
        ),
        "step": record.step or None,
    }
    if record.HasField("group"):
        result["trajectories"] = [trajectory_json(t) for t in record.group.trajectories]
    return result


def trajectory_json(trajectory: pb.Trajectory) -> dict[str, Any]:
    """One trajectory, its per-token arrays as lists."""
    arrays = {
        named.name: array_from_pb(named.tensor, named.name).tolist()
        for named in trajectory.tensors
        if named.name in TRAJECTORY_ARRAYS
    }
    return {
        "trajectory_id": trajectory.trajectory_id,
        "reward": trajectory.reward,
        "finish_reason": trajectory.finish_reason,
        "completion_text": trajectory.completion_text,
        **arrays,
    }

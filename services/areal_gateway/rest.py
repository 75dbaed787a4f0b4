"""The task API in JSON: what clients send, and how records and trajectories look."""

from __future__ import annotations

import json
import uuid
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from areal.protocol.leases import TaskRecord
from areal.protocol.trajectories import MAX_TIME_TO_LIVE_S, TRAJECTORY_ARRAYS, parse_json_object
from areal.tokenizer.json_text import dumps
from areal.types import Purpose, Task, Trajectory, WorkflowSpec
from areal.weights.manifest import MAX_POLICY_VERSION

MAX_TASKS = 10_000


def _travels(value: dict[str, Any]) -> dict[str, Any]:
    """Refuses what Python's JSON reads and no message can carry."""
    try:
        dumps(value)
        json.dumps(value, allow_nan=False)  # dumps writes null for them
    except TypeError as error:
        raise ValueError(str(error)) from None
    return value


def _encodes(value: str) -> str:
    if not value.isascii():
        value.encode()  # half of a surrogate pair: UnicodeEncodeError is a ValueError
    return value


Text = Annotated[str, AfterValidator(_encodes)]
JsonObject = Annotated[dict[str, Any], AfterValidator(_travels)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class WorkflowIn(_Model):
    """How to run the task; the default samples once and scores with "math"."""

    name: Text = "rlvr"
    recipe_digest: Text = ""
    kwargs: JsonObject = Field(default_factory=dict)


class TaskIn(_Model):
    """One dataset row to run."""

    task_id: str = Field(default="", max_length=200, pattern=r"^[A-Za-z0-9._:-]*$")
    purpose: Literal["serve", "train"] = "serve"
    workflow: WorkflowIn = Field(default_factory=WorkflowIn)
    data: JsonObject
    time_to_live_s: float | None = Field(default=None, gt=0, lt=MAX_TIME_TO_LIVE_S)
    traceparent: Text = ""
    policy_version: int | None = Field(default=None, ge=0, lt=MAX_POLICY_VERSION)


class SubmitIn(_Model):
    """Body of POST /v1/tasks."""

    tasks: list[TaskIn] = Field(min_length=1, max_length=MAX_TASKS)


class QueryIn(_Model):
    """Body of POST /v1/tasks/query."""

    task_ids: list[Text] = Field(min_length=1, max_length=MAX_TASKS)
    include_trajectories: bool = False


class CancelIn(_Model):
    """Body of POST /v1/tasks/cancel."""

    task_ids: list[Text] = Field(min_length=1, max_length=MAX_TASKS)
    reason: Text = ""


def explain(errors: list[Any], body: Any) -> str:
    """Returns the first validation error as one line that names task, field and value."""
    # A field's name may be half of a surrogate pair, which no answer can carry.
    return _explained(errors, body).encode("utf-8", "backslashreplace").decode()


def _explained(errors: list[Any], body: Any) -> str:
    error = errors[0]
    location = list(error["loc"])
    if location and location[0] in {"body", "query", "path"}:
        location = location[1:]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    path = path.removeprefix(".") or "body"
    if error["type"] == "json_invalid":
        return f"body: not JSON ({error['ctx']['error']})"
    if isinstance(body, bytes):  # what FastAPI passes on unread: a foreign page cannot post it
        return "body: expected JSON with the header Content-Type: application/json"
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


def task_from_model(model: TaskIn) -> Task:
    """Returns a submitted task; a task without an id gets one."""
    return Task(
        task_id=model.task_id or f"rest-{uuid.uuid4().hex}",
        purpose=Purpose(model.purpose),
        workflow=WorkflowSpec(
            name=model.workflow.name,
            recipe_digest=model.workflow.recipe_digest,
            kwargs_json=dumps(model.workflow.kwargs).decode(),
        ),
        data=model.data,
        time_to_live_s=model.time_to_live_s,
        traceparent=model.traceparent,
        policy_version=model.policy_version,
    )


def record_json(record: TaskRecord) -> dict[str, Any]:
    """Returns a task record, with `trajectories` if it has them. Times are Unix seconds."""
    task = record.task
    result: dict[str, Any] = {
        "task_id": task.task_id,
        "state": record.state.value,
        "purpose": task.purpose.value,
        "workflow": {
            "name": task.workflow.name,
            "recipe_digest": task.workflow.recipe_digest,
            "kwargs": parse_json_object(task.workflow.kwargs_json, "workflow.kwargs_json"),
        },
        "data": task.data,
        "position": (
            {"epoch": task.position[0], "index": task.position[1]} if task.position else None
        ),
        "reason": record.reason,
        "attempts": record.attempts,
        "infrastructure_attempts": record.infrastructure_attempts,
        "submit_time": record.submit_time or None,  # not of what was released
        "end_time": record.end_time,
        "step": record.step or None,
    }
    if record.group is not None:
        result["trajectories"] = [trajectory_json(t) for t in record.group.trajectories]
    return result


def trajectory_json(trajectory: Trajectory) -> dict[str, Any]:
    """Returns one trajectory, its per-token arrays as lists."""
    return {
        "trajectory_id": trajectory.trajectory_id,
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "finish_reason": trajectory.finish_reason.value,
        "completion_text": trajectory.completion_text,
        **{name: getattr(trajectory, name).tolist() for name in TRAJECTORY_ARRAYS},
    }

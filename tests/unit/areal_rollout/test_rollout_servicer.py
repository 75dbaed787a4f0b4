"""What RolloutService passes on to the buffer, and what it refuses by itself."""

from __future__ import annotations

from typing import Any

import pytest

from areal.errors import InvalidInput
from areal.types import WorkflowSpec
from areal.v1 import rollout_service_pb2 as pb
from areal.v1 import trajectory_pb2
from areal_rollout.servicer import RolloutService


class Buffer:
    """Knows what it was sent, and has one record."""

    def __init__(self) -> None:
        self.submitted: list[trajectory_pb2.Task] = []

    async def submit(self, tasks: Any) -> list[bool]:
        self.submitted += tasks
        return [True] * len(tasks)

    async def get(self, task_ids: Any, include_groups: bool) -> list[trajectory_pb2.TaskRecord]:
        group = trajectory_pb2.TrajectoryGroup(traceparent="not checked here")
        return [trajectory_pb2.TaskRecord(reason="kept", group=group if include_groups else None)]


async def check(spec: WorkflowSpec) -> None:
    if spec.name != "rlvr":
        raise InvalidInput(f"workflow.name {spec.name!r}: unknown")


def task(name: str) -> trajectory_pb2.Task:
    # A row that the buffer alone decodes.
    return trajectory_pb2.Task(
        task_id="a", workflow=trajectory_pb2.WorkflowSpec(name=name), data_json="{not JSON"
    )


async def test_submit_when_the_workflow_is_good_then_the_message_passes_undecoded() -> None:
    buffer = Buffer()
    servicer = RolloutService(buffer, check, None)  # type: ignore[arg-type]
    answer = await servicer.SubmitTasks(pb.SubmitTasksRequest(tasks=[task("rlvr")]), None)
    assert buffer.submitted == [task("rlvr")]
    assert [(each.task_id, each.accepted) for each in answer.results] == [("a", True)]


async def test_submit_when_the_workflow_has_no_name_then_it_is_the_built_in_one() -> None:
    buffer = Buffer()
    servicer = RolloutService(buffer, check, None)  # type: ignore[arg-type]
    await servicer.SubmitTasks(pb.SubmitTasksRequest(tasks=[task("")]), None)
    assert buffer.submitted[0].workflow.name == "rlvr"


async def test_submit_when_one_workflow_is_bad_then_nothing_is_submitted() -> None:
    buffer = Buffer()
    servicer = RolloutService(buffer, check, None)  # type: ignore[arg-type]
    request = pb.SubmitTasksRequest(tasks=[task("rlvr"), task("other")])
    with pytest.raises(InvalidInput, match=r"^tasks\[1\] 'a': workflow.name 'other'"):
        await servicer.SubmitTasks(request, None)
    assert not buffer.submitted


async def test_get_when_records_have_groups_then_they_pass_undecoded() -> None:
    servicer = RolloutService(Buffer(), check, None)  # type: ignore[arg-type]
    request = pb.GetTasksRequest(task_ids=["a"], include_trajectories=True)
    (record,) = (await servicer.GetTasks(request, None)).records
    assert (record.reason, record.group.traceparent) == ("kept", "not checked here")

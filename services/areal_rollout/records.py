"""Task records as messages."""

from __future__ import annotations

from areal.clients.buffer_types import TaskRecord
from areal.v1 import trajectory_pb2 as pb
from areal.wire import STATE_TO_PB, group_to_pb, task_to_pb


def record_to_pb(record: TaskRecord) -> pb.TaskRecord:
    """Encodes a record; the inverse of `areal.clients.buffer_types.record_from_pb`."""
    message = pb.TaskRecord(
        task=task_to_pb(record.task),
        state=STATE_TO_PB[record.state],
        reason=record.reason,
        attempts=record.attempts,
        infrastructure_attempts=record.infrastructure_attempts,
        step=record.step,
    )
    message.submit_time.FromMicroseconds(round(record.submit_time * 1e6))
    if record.end_time is not None:
        message.end_time.FromMicroseconds(round(record.end_time * 1e6))
    if record.group is not None:
        message.group.CopyFrom(group_to_pb(record.group))
    return message

"""The store's records as messages."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from areal.protocol.trajectories import PURPOSE_TO_PB, STATE_TO_PB
from areal.v1 import buffer_service_pb2 as pb
from areal.v1 import trajectory_pb2
from areal_buffer.memory import MemoryGauge
from areal_buffer.records import Stats, StoredTask, Take


def _timestamp(milliseconds: int) -> Timestamp:
    stamp = Timestamp()
    stamp.FromMilliseconds(milliseconds)
    return stamp


def record_message(task: StoredTask) -> trajectory_pb2.TaskRecord:
    """What GetTasks and ListDeadLetters tell of a task."""
    message = trajectory_pb2.TaskRecord(
        state=STATE_TO_PB[task.state],
        reason=task.reason,
        attempts=task.attempts,
        infrastructure_attempts=task.infrastructure_attempts,
        submit_time=_timestamp(task.submitted_ms),
        step=task.step,
    )
    if task.body:
        message.task.ParseFromString(task.body)
    else:
        message.task.task_id = task.task_id
        message.task.purpose = PURPOSE_TO_PB[task.purpose]
    if task.ended_ms:
        message.end_time.CopyFrom(_timestamp(task.ended_ms))
    if task.payload is not None:
        message.group.ParseFromString(task.payload)
    return message


def take_message(take: Take) -> pb.TakeBatchResponse:
    """The answer to one attempt at a batch."""
    return pb.TakeBatchResponse(
        state=pb.TakeState.Value(f"TAKE_STATE_{take.state.upper()}"),
        groups=[
            pb.GroupManifest(
                task_id=group.task_id,
                lengths=group.lengths,
                head_version=group.head_version,
                completed_time=_timestamp(group.completed_ms) if group.completed_ms else None,
            )
            for group in take.groups
        ],
        waiting_for=take.waiting_for,
        replay=take.replay,
        queued=take.queued,
        running=take.running,
        completed=take.completed,
        first_groups=take.payloads,
    )


def stats_message(stats: Stats, memory: MemoryGauge) -> pb.GetStatsResponse:
    """Counters and gauges, and how much memory is used of how much."""
    response = pb.GetStatsResponse(
        submitted=stats.submitted,
        counts=[
            pb.StateCount(state=STATE_TO_PB[state], tasks=tasks)
            for state, tasks in stats.counts.items()
        ],
        train_counts=[
            pb.StateCount(state=STATE_TO_PB[state], tasks=tasks)
            for state, tasks in stats.train_counts.items()
        ],
        policy_version=stats.policy_version,
        incarnation=stats.incarnation,
        last_taken_step=stats.last_taken_step,
        last_committed_step=stats.last_committed_step,
        batch_size=stats.batch_size,
        max_head_offpolicyness=stats.max_head_offpolicyness,
        max_concurrent_rollouts=stats.max_concurrent_rollouts,
        admission_headroom=stats.admission_headroom,
        staleness_mean=stats.staleness_mean,
        staleness_max=stats.staleness_max,
        regenerated=stats.regenerated,
        redis_memory_bytes=memory.redis_bytes,
        held_bytes=stats.held_bytes,
        limit_bytes=memory.limit_bytes,
        trajectories=stats.trajectories,
        generated_tokens=stats.generated_tokens,
        stopped=stats.stopped,
        retried=stats.retried,
    )
    if stats.oldest_queued_ms:
        response.oldest_queued_time.CopyFrom(_timestamp(stats.oldest_queued_ms))
    for failure in stats.failures:
        response.failures.add(
            site=failure.site,
            attempts=failure.attempts,
            task_id=failure.task_id,
            detail=failure.detail,
            time=_timestamp(failure.time_ms),
        )
    return response

"""What the scripts answer, in the shapes that cross the buffer's border."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from areal.protocol.leases import LedgerStats, Take, TakenGroup, TakeState, WorkflowFailure
from areal.protocol.trajectories import PURPOSE_TO_PB, STATE_TO_PB, GroupCodec
from areal.types import Purpose, TaskState
from areal.v1 import buffer_service_pb2 as pb
from areal.v1 import trajectory_pb2

# What `task_record` and `dead_letter` read of a task's hash.
RECORD_FIELDS = (
    "state",
    "purpose",
    "body",
    "reason",
    "cause",
    "traceback",
    "attempts",
    "infra",
    "submitted",
    "ended",
    "step",
)
Row = dict[str, bytes | None]


def text(value: Any) -> str:
    """Decodes text of a reply: bytes, or nil."""
    return value.decode(errors="replace") if value else ""


def leases(reply: Sequence[Any], time_to_live_ms: int) -> pb.LeaseTasksResponse:
    """Leases, or the reason for having none."""
    reason, rows = reply
    response = pb.LeaseTasksResponse(reason=text(reason))
    # Submessages are added in place: one made apart is serialized and parsed to be copied there.
    for _, body, token, version, partial, failed_servers, since, attempts in rows:
        lease = response.leases.add(
            token=int(token),
            policy_version=int(version),
            partial=partial,
            failed_servers=text(failed_servers).split("\n") if failed_servers else (),
            attempts=int(attempts),
        )
        lease.task.ParseFromString(body)
        lease.time_to_live.FromMilliseconds(time_to_live_ms)
        if int(since):
            lease.queued_time.FromMilliseconds(int(since))
    return response


def task_record(task_id: str, row: Row, payload: bytes | None) -> trajectory_pb2.TaskRecord:
    """Builds a task from its `RECORD_FIELDS` and, if asked for, its group as stored."""
    message = trajectory_pb2.TaskRecord(
        state=STATE_TO_PB[TaskState(text(row["state"]))],
        reason=text(row["reason"]),
        attempts=int(row["attempts"] or 0),
        infrastructure_attempts=int(row["infra"] or 0),
        submit_time=_timestamp(row["submitted"]),
        end_time=_timestamp(row["ended"]) if row["ended"] else None,
        step=int(row["step"] or 0),
    )
    if row["body"]:
        message.task.ParseFromString(row["body"])
    else:  # released
        message.task.task_id = task_id
        message.task.purpose = PURPOSE_TO_PB[Purpose(text(row["purpose"]))]
    if payload is not None:
        message.group.ParseFromString(GroupCodec().expand(payload))
    return message


def dead_letter(task_id: str, row: Row) -> pb.DeadLetter:
    """Builds a dead letter: a task that failed permanently, and why."""
    return pb.DeadLetter(
        record=task_record(task_id, row, None),
        cause=text(row["cause"]),
        traceback=text(row["traceback"]),
    )


def discarded(entry: bytes) -> pb.Discarded:
    """Reads an entry of the list of train tasks that ended untrained, or lost a group."""
    name, outcome, reason = text(entry).split("\n", 2)
    task_id, _, token = name.rpartition("/")
    return pb.Discarded(task_id=task_id, token=int(token), outcome=outcome, reason=reason)


def take(reply: Sequence[Any]) -> Take:
    """Builds the result of one attempt to take a batch."""
    state, why, replay, queued, running, completed, wanted, payloads, entries = reply
    return Take(
        state=TakeState(text(state)),
        waiting_for=text(why),
        replay=replay == 1,
        queued=queued,
        running=running,
        completed=completed,
        rows_wanted=wanted == 1,
        groups=tuple(_taken_group(entry) for entry in entries),
        first_groups=tuple(payloads),
    )


def _taken_group(entry: bytes) -> TakenGroup:
    # A batch taken before the time was kept has no fourth part.
    task_id, head, lengths, *since = entry.decode().split("\n")
    sizes = tuple(int(n) for n in lengths.split(",") if n)
    return TakenGroup(task_id, sizes, int(head), int(since[0]) / 1000 if since else 0.0)


def stats(reply: Sequence[Any]) -> LedgerStats:
    """Decodes counters and gauges; Redis's memory and limit are not part of the ledger."""
    meta, counts, headroom, oldest, batch_size, eta, concurrent, first, attempts = reply
    numbers: dict[str, int] = {}
    stopped = ""
    for key, value in _pairs(meta):
        if value.lstrip(b"-").isdigit():
            numbers[key.decode()] = int(value)
        if key == b"stopped":
            stopped = text(value)
    tallies = {key.decode(): int(value) for key, value in _pairs(counts)}
    taken = numbers.get("staleness_count", 0)
    return LedgerStats(
        submitted=numbers.get("submitted", 0),
        counts={state: tallies.get(f"all:{state}", 0) for state in TaskState},
        train_counts={state: tallies.get(f"train:{state}", 0) for state in TaskState},
        policy_version=numbers.get("policy_version", 0),
        incarnation=numbers.get("incarnation", 0),
        last_taken_step=numbers.get("last_taken", 0),
        last_committed_step=numbers.get("last_committed", 0),
        batch_size=int(batch_size),
        max_head_offpolicyness=int(eta),
        max_concurrent_rollouts=int(concurrent),
        admission_headroom=int(headroom),
        staleness_mean=numbers.get("staleness_sum", 0) / taken if taken else 0.0,
        staleness_max=numbers.get("staleness_max", 0),
        regenerated=numbers.get("regenerated", 0),
        oldest_queued_time=int(oldest) / 1000 if int(oldest) else None,
        trajectories=numbers.get("trajectories", 0),
        generated_tokens=numbers.get("generated_tokens", 0),
        failures=_failures(first, dict(_pairs(attempts))),
        stopped=stopped,
        retried=numbers.get("retried", 0),
        held_bytes=numbers.get("bytes:train", 0) + numbers.get("bytes:serve", 0),
    )


def _failures(first: Sequence[bytes], attempts: dict[bytes, bytes]) -> tuple[WorkflowFailure, ...]:
    """Decodes the hashes `failures` and `failures:attempts`."""
    found = []
    for site, value in _pairs(first):
        task_id, time_ms, detail = text(value).split("\n", 2)
        count = int(attempts.get(site, 0))
        found.append(WorkflowFailure(text(site), count, task_id, detail, int(time_ms) / 1000))
    return tuple(sorted(found, key=lambda failure: -failure.attempts))


def _pairs(listed: Sequence[bytes]) -> Iterable[tuple[bytes, bytes]]:
    """A hash, as Redis lists it."""
    return zip(listed[::2], listed[1::2], strict=True)


def _timestamp(milliseconds: bytes | None) -> Timestamp:
    stamp = Timestamp()
    stamp.FromMilliseconds(int(milliseconds or 0))
    return stamp

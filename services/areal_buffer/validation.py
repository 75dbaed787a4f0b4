"""Checks of everything that comes in, before any of it is stored. One line names what is wrong."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from google.protobuf.message import DecodeError

from areal.errors import InvalidInput
from areal.protocol.trajectories import GroupCodec, check_group_pb, parse_json_object, task_from_pb
from areal.v1 import buffer_service_pb2 as pb
from areal.v1 import trajectory_pb2
from areal.weights.manifest import MAX_POLICY_VERSION
from areal_buffer.records import Completion, NewTask

MAX_TASKS_PER_CALL = 10_000
MAX_LEASES_PER_CALL = 1_000
MAX_DATA_BYTES = 1024 * 1024
MAX_RECIPE_BYTES = 1024 * 1024
_MAX_KWARGS_BYTES = 64 * 1024
# Text in UTF-8 takes up to four bytes a character.
_MAX_TASK_BYTES = 4 * (MAX_DATA_BYTES + _MAX_KWARGS_BYTES) + 4096
_MAX_TRACEBACK_CHARS = 16_000
_MAX_LINE_CHARS = 2_000
_MAX_SERVER_CHARS = 300
_MAX_REASON_CHARS = 300
_MAX_SITE_CHARS = 200
# In an error's line: what differs from row to row.
_VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|\d+(?:\.\d+)?")
_CAUSES = (
    pb.RETURN_CAUSE_DRAIN,
    pb.RETURN_CAUSE_WORKFLOW_ERROR,
    pb.RETURN_CAUSE_INFRASTRUCTURE,
)
# A bitmap of 2^27 positions is 16 MiB.
_MAX_POSITION_INDEX = 2**27
_MAX_EPOCH = 2**31
# Lua's numbers are doubles.
_MAX_NUMBER = 2**53
_TASK_ID = re.compile(r"[A-Za-z0-9._:-]{1,200}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def check_task_id(task_id: str, field: str = "task_id") -> str:
    """Raises InvalidInput unless it is an id."""
    if not _TASK_ID.fullmatch(task_id):
        raise InvalidInput(f"{field} {task_id[:80]!r}: expected 1 to 200 of [A-Za-z0-9._:-]")
    return task_id


def check_task_ids(task_ids: Sequence[str], *, at_least: int = 0) -> list[str]:
    """Checks that ids are valid, distinct and not too many; raises InvalidInput."""
    if not at_least <= len(task_ids) <= MAX_TASKS_PER_CALL:
        raise InvalidInput(
            f"task_ids: got {len(task_ids)}, expected {at_least} to {MAX_TASKS_PER_CALL}"
        )
    for task_id in task_ids:
        check_task_id(task_id, "task_ids")
    if len(set(task_ids)) != len(task_ids):
        twice = next(each for each, count in Counter(task_ids).items() if count > 1)
        raise InvalidInput(f"task_ids: {twice!r} appears twice")
    return list(task_ids)


def check_step(value: int, field: str, at_least: int) -> int:
    """Checks a train step that can be a policy version; raises InvalidInput."""
    if not at_least <= value < MAX_POLICY_VERSION:
        raise InvalidInput(f"{field} {value}: expected {at_least} to {MAX_POLICY_VERSION - 1}")
    return value


def check_number(value: int, field: str, at_least: int) -> int:
    """Checks that a number is within at_least .. 2^53; raises InvalidInput."""
    if not at_least <= value < _MAX_NUMBER:
        raise InvalidInput(f"{field} {value}: expected {at_least} or more, below 2^53")
    return value


def check_digest(digest: str, field: str = "recipe_digest") -> str:
    """Checks the digest of a recipe, which may be empty; raises InvalidInput."""
    if digest and not _DIGEST.fullmatch(digest):
        raise InvalidInput(f"{field} {digest[:80]!r}: expected sha256 in hex")
    return digest


def check_worker_id(worker_id: str) -> str:
    """Checks that an id is not empty and is one line; raises InvalidInput."""
    if not worker_id or len(worker_id) > 200 or not worker_id.isprintable():
        raise InvalidInput(f"worker_id {worker_id[:80]!r}: expected 1 to 200 printable characters")
    return worker_id


def check_task(message: trajectory_pb2.Task) -> NewTask:
    """Checks one task of a submission; raises InvalidInput that names task and field."""
    check_task_id(message.task_id)
    who = f"task {message.task_id!r}"
    if len(message.data_json) > MAX_DATA_BYTES:
        raise InvalidInput(
            f"{who} data_json has {len(message.data_json)} characters: at most {MAX_DATA_BYTES}"
        )
    task = task_from_pb(message)
    spec = message.workflow
    if not spec.name or len(spec.name) > 200:
        raise InvalidInput(f"{who} workflow.name {spec.name[:80]!r}: expected 1 to 200 characters")
    if spec.recipe_digest and not _DIGEST.fullmatch(spec.recipe_digest):
        raise InvalidInput(
            f"{who} workflow.recipe_digest {spec.recipe_digest[:80]!r}: expected sha256 in hex"
        )
    if len(spec.kwargs_json) > _MAX_KWARGS_BYTES:
        raise InvalidInput(
            f"{who} workflow.kwargs_json has {len(spec.kwargs_json)} characters: "
            f"at most {_MAX_KWARGS_BYTES}"
        )
    parse_json_object(spec.kwargs_json, f"{who} workflow.kwargs_json")
    if len(message.traceparent) > 200:
        raise InvalidInput(f"{who} traceparent: more than 200 characters")
    if task.position is not None:
        epoch, index = task.position
        if not (0 <= epoch < _MAX_EPOCH and 0 <= index < _MAX_POSITION_INDEX):
            raise InvalidInput(
                f"{who} position ({epoch}, {index}): expected epoch < 2^31 and index < 2^27"
            )
    time_to_live_ms = None
    if task.time_to_live_s is not None:
        time_to_live_ms = int(task.time_to_live_s * 1000)
    body = message.SerializeToString()
    if len(body) > _MAX_TASK_BYTES:  # fields that this version does not know count too
        raise InvalidInput(f"{who} has {len(body)} bytes: at most {_MAX_TASK_BYTES}")
    return NewTask(
        task_id=message.task_id,
        purpose=task.purpose,
        body=body,
        position=task.position,
        time_to_live_ms=time_to_live_ms,
    )


def check_group(
    completion: pb.Completion, max_group_bytes: int, codec: GroupCodec | None = None
) -> Completion:
    """Checks a finished group; raises InvalidInput that names group, trajectory and tensor."""
    task_id = check_task_id(completion.lease.task_id, "lease.task_id")
    check_number(completion.lease.token, "lease.token", 1)
    payload = completion.group
    try:
        message = trajectory_pb2.TrajectoryGroup.FromString(
            (codec or GroupCodec()).expand(payload, max_group_bytes)
        )
    except DecodeError:
        raise InvalidInput(f"group of task {task_id!r}: not a TrajectoryGroup") from None
    if message.task_id != task_id:
        raise InvalidInput(
            f"group.task_id {message.task_id[:80]!r}: expected the task's id {task_id!r}"
        )
    arrays = check_group_pb(message)
    trajectories = message.trajectories
    ids = {trajectory.trajectory_id for trajectory in trajectories}
    if "" in ids or len(ids) != len(trajectories):
        raise InvalidInput(f"group {task_id!r}: trajectory_id must be set and distinct")
    versions = arrays["token_versions"]
    sampled = versions[versions >= 0]
    generated = int(sampled.size)
    if generated and int(sampled.max()) >= MAX_POLICY_VERSION:
        raise InvalidInput(
            f"group {task_id!r} token_versions: {int(sampled.max())} is no policy version"
        )
    return Completion(
        task_id=task_id,
        token=completion.lease.token,
        payload=payload,
        head_version=int(sampled.min()) if generated else -1,
        lengths=tuple(trajectory.length for trajectory in trajectories),
        generated_tokens=generated,
        mean_reward=float(arrays["rewards"].sum(dtype=np.float64)) / len(trajectories),
    )


def check_completion(
    completion: pb.Completion, max_group_bytes: int, codec: GroupCodec
) -> Completion | InvalidInput:
    """Returns a finished group, or why it is invalid: each group is refused by itself."""
    try:
        return check_group(completion, max_group_bytes, codec)
    except InvalidInput as error:
        return error


def check_return(message: pb.Return, max_partial_bytes: int) -> pb.Return | InvalidInput:
    """Returns the end of a lease with bounded texts, or why it is invalid.

    Args:
        message: The message as received; it is changed in place.
        max_partial_bytes: A longer journal is refused.
    """
    try:
        task_id = check_task_id(message.lease.task_id, "lease.task_id")
        check_number(message.lease.token, "lease.token", 1)
    except InvalidInput as error:
        return error
    if message.cause not in _CAUSES:
        return InvalidInput(
            f"cause {message.cause}: expected DRAIN, WORKFLOW_ERROR or INFRASTRUCTURE"
        )
    if (size := len(message.partial)) > max_partial_bytes:
        return InvalidInput(
            f"task {task_id!r} partial has {size} bytes: at most {max_partial_bytes}"
        )
    server = message.failed_server
    if len(server) > _MAX_SERVER_CHARS or "\n" in server:
        return InvalidInput(f"failed_server {server[:80]!r}: expected an address")
    message.site = _site(message) if message.cause == pb.RETURN_CAUSE_WORKFLOW_ERROR else ""
    message.detail = line(message.detail)
    message.traceback = traceback_text(message.traceback)
    return message


def _site(message: pb.Return) -> str:
    """Returns what similar failures share: the site, or the detail without the row's values."""
    told = message.site or _VALUES.sub("…", message.detail)
    return " ".join(told.split())[:_MAX_SITE_CHARS] or "an error without a message"


def line(text: str) -> str:
    """Returns one bounded line of text for people."""
    return " ".join(text.split())[:_MAX_LINE_CHARS]


def reason(text: str) -> str:
    """Returns why a task ended, short enough to stay with its record for good."""
    return line(text)[:_MAX_REASON_CHARS]


def traceback_text(text: str) -> str:
    """Returns a bounded traceback; keeps its end, which says most."""
    return text[-_MAX_TRACEBACK_CHARS:]

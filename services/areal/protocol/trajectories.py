"""Conversions between `areal.types` and the protobuf messages. No grpc here.

A finished group is sent as it is stored: a zstd frame, unless it is too small to benefit. A worker
packs it once, the ledger checks and keeps these bytes, and a trainer gets them. The first bytes
tell which it is: a frame begins with its magic number, and no TrajectoryGroup does (as a message
these bytes would be a number in field 5, which does not exist).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import zstandard

from areal import images
from areal.errors import InvalidInput
from areal.protocol import routes
from areal.tokenizer.json_text import TooDeep, dumps, loads
from areal.types import (
    Purpose,
    StopReason,
    Task,
    TaskState,
    Trajectory,
    TrajectoryGroup,
    WorkflowSpec,
)
from areal.v1 import trajectory_pb2 as pb
from areal.weights.manifest import MAX_POLICY_VERSION

MAX_GROUP_BYTES = 64 * 1024 * 1024
"""A finished group larger than this is refused. Compressed, a message holds at most 90 MiB."""
_MAGIC = b"\x28\xb5\x2f\xfd"
# Below, the record around the group weighs more than what would be saved.
MIN_BYTES = 512
# Higher levels take longer, also to expand, and save little: tools/bench/compression.py. Routes
# repeat little, and only from level 1 on do frequent bytes get shorter codes.
_LEVEL, _LEVEL_OF_ROUTES = -1, 1
# What any message may have.
_MAX_BYTES = 128 * 1024 * 1024


class GroupCodec:
    """Zstd that keeps its working memory, which costs more to create than to compress a group.

    Not thread-safe.
    """

    def __init__(self) -> None:
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)
        self._compressor_of_routes = zstandard.ZstdCompressor(level=_LEVEL_OF_ROUTES)
        self._decompressor = zstandard.ZstdDecompressor()

    def compress(self, payload: bytes, *, routed: bool = False) -> bytes:
        """Returns a serialized group as it is sent and stored; `routed`: it has routes."""
        if len(payload) < MIN_BYTES:
            return payload
        return (self._compressor_of_routes if routed else self._compressor).compress(payload)

    def expand(self, stored: bytes, max_bytes: int = _MAX_BYTES) -> bytes:
        """Returns the serialized group.

        Raises:
            InvalidInput: The frame is broken, or larger than max_bytes (checked before memory is
                allocated).
        """
        if not stored.startswith(_MAGIC):
            size, payload = len(stored), stored
        else:
            try:
                size = zstandard.frame_content_size(stored)
                if size < 0:
                    raise InvalidInput("group: a zstd frame without its content size")
                if size <= max_bytes:
                    payload = self._decompressor.decompress(stored, allow_extra_data=False)
            except zstandard.ZstdError as error:
                raise InvalidInput(f"group: not a zstd frame ({error})") from None
        if size > max_bytes:
            raise InvalidInput(f"group has {size} bytes: at most {max_bytes}")
        return payload


# 35 years: far within what a duration, a clock and Lua's numbers can hold.
MAX_TIME_TO_LIVE_S = 2**40 / 1000
# The arrays of a trajectory and their dtypes on the wire.
TRAJECTORY_ARRAYS = {
    "input_ids": "int32",
    "loss_mask": "bool",
    "behavior_logprobs": "float32",
    "token_versions": "int32",
    "rewards": "float32",
}
_ARRAY_DTYPES = {
    name: np.dtype(dtype).newbyteorder("<") for name, dtype in TRAJECTORY_ARRAYS.items()
}

_STOP_REASONS = {reason.value: reason for reason in StopReason}
STATE_TO_PB: dict[TaskState, pb.TaskState.ValueType] = {
    state: pb.TaskState.Value(f"TASK_STATE_{state.name}") for state in TaskState
}
STATE_FROM_PB = {value: key for key, value in STATE_TO_PB.items()}
PURPOSE_TO_PB: dict[Purpose, pb.Purpose.ValueType] = {
    purpose: pb.Purpose.Value(f"PURPOSE_{purpose.name}") for purpose in Purpose
}
PURPOSE_FROM_PB = {value: key for key, value in PURPOSE_TO_PB.items()}


def group_to_pb(group: TrajectoryGroup) -> pb.TrajectoryGroup:
    """Encodes a group: each array once for all its trajectories.

    Routes of more than `routes.MAX_BYTES` together are left out.

    Raises:
        InvalidInput: An array of a trajectory has another length than the trajectory.
    """
    # Submessages are added in place: one that is made apart is copied into its parent by being
    # serialized and parsed.
    message = pb.TrajectoryGroup(
        task_id=group.task_id,
        traceparent=group.traceparent,
        queued_s=group.queued_s,
        episode_s=group.episode_s,
        score_s=group.score_s,
    )
    trajectories = group.trajectories
    if not trajectories:
        return message
    if any(each.images != group.images for each in trajectories):
        raise InvalidInput(
            f"group {group.task_id!r}: trajectories have different images: expected the row's "
            "images in each"
        )
    message.images.extend(group.images)
    lengths = [len(trajectory.input_ids) for trajectory in trajectories]
    shapes, total = [(length,) for length in lengths], sum(lengths)
    for trajectory, length in zip(trajectories, lengths, strict=True):
        message.trajectories.add(
            trajectory_id=trajectory.trajectory_id,
            length=length,
            reward=trajectory.reward,
            finish_reason=trajectory.finish_reason,
            completion_text=trajectory.completion_text,
            reward_parts=trajectory.reward_parts,
            generation_s=trajectory.generation_s,
            servers=trajectory.servers,
            split=trajectory.split,
        )
    for name, dtype in _ARRAY_DTYPES.items():
        arrays: list[Any] = [
            np.asarray(getattr(each, name), dtype, order="C") for each in trajectories
        ]
        if [array.shape for array in arrays] != shapes:
            raise _not_aligned(name, arrays, trajectories)
        tensor = message.tensors.add(name=name).tensor
        tensor.dtype = TRAJECTORY_ARRAYS[name]
        tensor.shape.append(total)
        tensor.data = b"".join(arrays)
    routes.add_to(message, trajectories)
    return message


def _not_aligned(name: str, arrays: list[Any], trajectories: list[Trajectory]) -> InvalidInput:
    """The first of those arrays that is not as long as its trajectory's tokens."""
    array, of = next(
        (array, of)
        for array, of in zip(arrays, trajectories, strict=True)
        if array.shape != (len(of.input_ids),)
    )
    return InvalidInput(
        f"trajectory {of.trajectory_id!r} {name}: length "
        f"{array.size if array.ndim == 1 else list(array.shape)}, expected {len(of.input_ids)} "
        "as input_ids"
    )


def group_from_pb(message: pb.TrajectoryGroup) -> TrajectoryGroup:
    """Decodes and validates a group; the arrays are read-only views.

    Raises:
        InvalidInput: It is empty, a tensor is missing, has the wrong dtype or length, a value is
            not finite, or a sampled token has no version.
    """
    arrays = _arrays_from_pb(message)
    trajectories, start, images = [], 0, tuple(message.images)
    for each, routed in zip(message.trajectories, routes.parts_of(message), strict=True):
        here = slice(start, start := start + each.length)
        trajectories.append(
            Trajectory(
                each.trajectory_id,
                arrays["input_ids"][here],
                arrays["loss_mask"][here],
                arrays["behavior_logprobs"][here],
                arrays["token_versions"][here],
                arrays["rewards"][here],
                _finish_reason(each),
                each.completion_text,
                images,
                dict(each.reward_parts),
                each.generation_s,
                tuple(each.servers),
                each.split,
                routed,
            )
        )
    return TrajectoryGroup(
        message.task_id,
        trajectories,
        message.traceparent,
        message.queued_s,
        message.episode_s,
        message.score_s,
    )


def pack_group(group: TrajectoryGroup, codec: GroupCodec | None = None) -> bytes:
    """Encodes a group as it is handed in and stored; raises InvalidInput."""
    message = group_to_pb(group)
    routed = any(each.gap_tokens for each in message.trajectories)
    return (codec or GroupCodec()).compress(message.SerializeToString(), routed=routed)


def unpack_group(payload: bytes, codec: GroupCodec | None = None) -> TrajectoryGroup:
    """Decodes what `pack_group` gave; raises InvalidInput."""
    return group_from_pb(pb.TrajectoryGroup.FromString((codec or GroupCodec()).expand(payload)))


def check_group_pb(message: pb.TrajectoryGroup) -> dict[str, npt.NDArray[Any]]:
    """Validates a group as `group_from_pb` does, without making its trajectories.

    Returns:
        Its arrays, each for all trajectories one after the other.
    """
    arrays = _arrays_from_pb(message)
    routes.check(message)
    for each in message.trajectories:
        _finish_reason(each)
    return arrays


def _arrays_from_pb(message: pb.TrajectoryGroup) -> dict[str, npt.NDArray[Any]]:
    """The arrays of a trajectory, for all of the group; raises InvalidInput."""
    who = f"group {message.task_id!r}"
    if not message.trajectories:
        raise InvalidInput(f"{who}: has no trajectories")
    lengths = [trajectory.length for trajectory in message.trajectories]
    if min(lengths) < 0:
        raise InvalidInput(f"{who}: a trajectory has length {min(lengths)}, expected 0 or more")
    total = sum(lengths)
    tensors = {t.name: t.tensor for t in message.tensors}
    arrays = {}
    for name, dtype in _ARRAY_DTYPES.items():
        tensor = tensors.get(name)
        if tensor is None:
            raise InvalidInput(f"{who}: tensor {name!r} is missing")
        data, shape = tensor.data, tensor.shape
        if (
            tensor.dtype != TRAJECTORY_ARRAYS[name]
            or len(shape) != 1
            or shape[0] != total
            or len(data) != total * dtype.itemsize
        ):
            raise InvalidInput(f"{who} {name}{_fault(tensor, TRAJECTORY_ARRAYS[name], total)}")
        arrays[name] = np.frombuffer(data, dtype)
    for name in ("behavior_logprobs", "rewards"):
        finite = np.isfinite(arrays[name])
        if np.count_nonzero(finite) < total:
            raise InvalidInput(f"{_owner(message, ~finite)} {name}: a value is not finite")
    for trajectory in message.trajectories:
        if not math.isfinite(trajectory.reward):
            raise InvalidInput(
                f"trajectory {trajectory.trajectory_id!r} reward {trajectory.reward}: expected a "
                "finite number"
            )
    # A workflow may leave sampled tokens out of the loss, but cannot train on unsampled ones.
    unsampled = arrays["loss_mask"] & (arrays["token_versions"] < 0)
    if np.count_nonzero(unsampled):
        raise InvalidInput(
            f"{_owner(message, unsampled)}: token_versions must be >= 0 wherever loss_mask is set"
        )
    return arrays


def _fault(tensor: pb.Tensor, dtype: str, total: int) -> str:
    """Says what is wrong with a tensor that is not `total` values of that dtype."""
    if tensor.dtype != dtype or len(tensor.shape) != 1:
        return f": got {tensor.dtype[:20]!r} {list(tensor.shape[:8])}, expected {dtype}[L]"
    if tensor.shape[0] != total:
        return f": length {tensor.shape[0]}, expected {total} as the trajectories together"
    expected = total * np.dtype(dtype).itemsize
    return f".data has {len(tensor.data)} bytes: expected {expected} for {dtype}[{total}]"


def _owner(message: pb.TrajectoryGroup, wrong: npt.NDArray[Any]) -> str:
    """The trajectory that the first wrong token belongs to."""
    ends = np.cumsum([trajectory.length for trajectory in message.trajectories])
    index = int(np.searchsorted(ends, int(wrong.argmax()), side="right"))
    return f"trajectory {message.trajectories[index].trajectory_id!r}"


def _finish_reason(message: pb.Trajectory) -> StopReason:
    reason = _STOP_REASONS.get(message.finish_reason)
    if reason is None:
        raise InvalidInput(
            f"trajectory {message.trajectory_id!r} finish_reason {message.finish_reason!r}: "
            f"expected one of {', '.join(StopReason)}"
        )
    return reason


def workflow_from_pb(message: pb.WorkflowSpec) -> WorkflowSpec:
    """Decodes a workflow's description; checks nothing."""
    return WorkflowSpec(message.name, message.recipe_digest, message.kwargs_json or "{}")


def row_json(row: dict[str, Any]) -> str:
    """Encodes a row, its images as data URLs; raises InvalidInput naming what JSON cannot hold."""
    try:
        return _dumped(row).decode()
    except orjson.JSONEncodeError as error:
        if "ecursion" not in str(error) and (fault := _no_json(row, "")):
            raise InvalidInput(f"field {fault}") from None
        raise


def _dumped(value: Any) -> bytes:
    return dumps(value, images.portable, orjson.OPT_SERIALIZE_NUMPY)


def _no_json(value: Any, where: str) -> str:
    """Names the first value inside that JSON cannot hold; "": there is none."""
    if isinstance(value, dict):
        dot = "." if where else ""
        for key, each in value.items():
            if not isinstance(key, str):
                return f"{where or 'names'}: got the key {key!r}, expected text"
            if fault := _no_json(each, f"{where}{dot}{key}"):
                return fault
    elif isinstance(value, (list, tuple)):
        faults = (_no_json(each, f"{where}[{number}]") for number, each in enumerate(value))
        return next(filter(None, faults), "")
    else:
        try:
            _dumped(value)
        except orjson.JSONEncodeError as error:
            if isinstance(error.__cause__, InvalidInput):  # a file that is no image
                return f"{where}: {error.__cause__}"
            kind = type(value).__name__
            return f"{where}: got {kind} {value!r:.60}, expected a JSON type or an image"
    return ""


def task_to_pb(task: Task) -> pb.Task:
    """Encodes a task; its data must be JSON types, or images (see `areal.images`)."""
    message = pb.Task(
        task_id=task.task_id,
        purpose=PURPOSE_TO_PB[task.purpose],
        workflow=pb.WorkflowSpec(
            recipe_digest=task.workflow.recipe_digest,
            name=task.workflow.name,
            kwargs_json=task.workflow.kwargs_json,
        ),
        data_json=row_json(task.data),
        traceparent=task.traceparent,
    )
    if task.position is not None:
        message.position.epoch, message.position.index = task.position
    if task.time_to_live_s is not None:
        message.time_to_live.FromMilliseconds(int(task.time_to_live_s * 1000))
    if task.policy_version is not None:
        message.policy_version = task.policy_version
    return message


def parse_json_object(text: str, field: str) -> dict[str, Any]:
    """Parses a JSON object; raises InvalidInput naming the field."""
    try:
        value = loads(text or "{}")
    except TooDeep as error:
        raise InvalidInput(f"{field}: {error}") from None
    except ValueError as error:
        raise InvalidInput(f"{field}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise InvalidInput(f"{field}: expected a JSON object, got {type(value).__name__}")
    return value


def task_from_pb(message: pb.Task) -> Task:
    """Decodes a task; raises InvalidInput for an unknown purpose, bad JSON or a bad time."""
    if message.purpose not in PURPOSE_FROM_PB:
        raise InvalidInput(
            f"task {message.task_id!r} purpose {message.purpose}: expected TRAIN or SERVE"
        )
    time_to_live_s = None
    if message.HasField("time_to_live"):
        time_to_live_s = message.time_to_live.ToMilliseconds() / 1000
        if not 0 < time_to_live_s < MAX_TIME_TO_LIVE_S:
            raise InvalidInput(
                f"task {message.task_id!r} time_to_live {time_to_live_s} s: expected more than 0, "
                f"at most {MAX_TIME_TO_LIVE_S:.0f}"
            )
    pinned = message.policy_version if message.HasField("policy_version") else None
    if pinned is not None and (
        message.purpose != pb.PURPOSE_SERVE or not 0 <= pinned < MAX_POLICY_VERSION
    ):
        raise InvalidInput(
            f"task {message.task_id!r} policy_version {pinned}: expected 0 to "
            f"{MAX_POLICY_VERSION - 1}, and purpose SERVE"
        )
    position = (
        (message.position.epoch, message.position.index) if message.HasField("position") else None
    )
    return Task(
        task_id=message.task_id,
        purpose=PURPOSE_FROM_PB[message.purpose],
        workflow=workflow_from_pb(message.workflow),
        data=parse_json_object(message.data_json, f"task {message.task_id!r} data_json"),
        position=position,
        time_to_live_s=time_to_live_s,
        traceparent=message.traceparent,
        policy_version=pinned,
    )

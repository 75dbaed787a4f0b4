"""The experts that a server chose, on the wire: those of a trajectory's first tokens.

Trajectory.routed_experts   uint8 or uint16 [R, layers, k], R at most the number of tokens
TrajectoryGroup.tensors     `routed_experts`: those of all trajectories, one after the other;
                            `Trajectory.routed_tokens` says how many each has
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from areal.errors import InvalidInput
from areal.types import Trajectory
from areal.v1 import trajectory_pb2 as pb

NAME = "routed_experts"
MAX_BYTES = 48 * 1024 * 1024
"""Largest size of a group's routes. A group with more is sent without any, so that its tokens still
fit."""
_DTYPES = {name: np.dtype(name).newbyteorder("<") for name in ("uint8", "uint16")}


def tensor_of(routes: npt.NDArray[Any] | None) -> pb.Tensor | None:
    """Encodes the routes of one sequence; None for none.

    Raises:
        InvalidInput: It is not a uint8 or uint16 array of three dimensions.
    """
    if routes is None or not len(routes):
        return None
    _check(routes, "routed_experts")
    data = np.asarray(routes, _DTYPES[routes.dtype.name], order="C").tobytes()
    return pb.Tensor(dtype=routes.dtype.name, shape=routes.shape, data=data)


def array_of(tensor: pb.Tensor, who: str) -> npt.NDArray[Any]:
    """Decodes a tensor of routes, uint8 or uint16 [tokens, layers, k]; a read-only view.

    Raises:
        InvalidInput: Its dtype, shape or size is another; `who` names it.
    """
    dtype, shape = _DTYPES.get(tensor.dtype), tuple(tensor.shape)
    if dtype is None or len(shape) != 3 or min(shape) < 0:
        raise InvalidInput(
            f"{who}: got {tensor.dtype[:20]!r} {list(shape[:8])}, expected uint8 or uint16 "
            "[tokens, layers, k]"
        )
    expected = dtype.itemsize * shape[0] * shape[1] * shape[2]
    if len(tensor.data) != expected:
        raise InvalidInput(
            f"{who}.data has {len(tensor.data)} bytes: expected {expected} for "
            f"{tensor.dtype}{list(shape)}"
        )
    return np.frombuffer(tensor.data, dtype).reshape(shape)


def add_to(message: pb.TrajectoryGroup, trajectories: Sequence[Trajectory]) -> None:
    """Encodes the routes of a group's trajectories, unless together they have over MAX_BYTES.

    Those of another model than the first's, or of more tokens than their trajectory, are none.

    Raises:
        InvalidInput: As `tensor_of`.
    """
    kept = _usable(trajectories)
    some = [routes for routes in kept if routes is not None]
    if not some or _bytes_of(some) > MAX_BYTES:
        return
    for one, routes in zip(message.trajectories, kept, strict=True):
        one.routed_tokens = 0 if routes is None else len(routes)
    dtype = _dtype_of(some)
    tensor = message.tensors.add(name=NAME).tensor
    tensor.dtype = dtype.name
    tensor.shape.extend((sum(map(len, some)), *some[0].shape[1:]))
    tensor.data = b"".join(np.asarray(routes, dtype, order="C").tobytes() for routes in some)


def bytes_of(trajectories: Sequence[Trajectory]) -> int:
    """Returns how many bytes the routes of a group take; those over MAX_BYTES are not sent.

    Raises:
        InvalidInput: As `tensor_of`.
    """
    return _bytes_of([routes for routes in _usable(trajectories) if routes is not None])


def _bytes_of(some: Sequence[npt.NDArray[Any]]) -> int:
    return sum(routes.size for routes in some) * _dtype_of(some).itemsize if some else 0


def _dtype_of(some: Sequence[npt.NDArray[Any]]) -> np.dtype[Any]:
    """The one that holds them all."""
    return max((_DTYPES[routes.dtype.name] for routes in some), key=lambda each: each.itemsize)


def _usable(trajectories: Sequence[Trajectory]) -> list[npt.NDArray[Any] | None]:
    """The routes of each trajectory; None where they cannot be its own."""
    having = [each.routed_experts for each in trajectories]
    for routes in having:
        if routes is not None:
            _check(routes, "trajectory routed_experts")
    kept = [
        routes if routes is not None and 0 < len(routes) <= len(trajectory.input_ids) else None
        for routes, trajectory in zip(having, trajectories, strict=True)
    ]
    first = next((routes for routes in kept if routes is not None), None)
    if first is None:
        return kept
    return [r if r is not None and r.shape[1:] == first.shape[1:] else None for r in kept]


def parts_of(message: pb.TrajectoryGroup) -> list[npt.NDArray[Any] | None]:
    """Decodes the routes of each trajectory of a group; read-only views.

    Raises:
        InvalidInput: As `array_of`, or the trajectories have more or fewer tokens than the tensor.
    """
    who = f"group {message.task_id!r} {NAME}"
    counts = [each.routed_tokens for each in message.trajectories]
    for each in message.trajectories:
        if not 0 <= each.routed_tokens <= max(each.length, 0):
            raise InvalidInput(
                f"trajectory {each.trajectory_id!r} routed_tokens {each.routed_tokens}: expected "
                f"0 to {each.length}, its length"
            )
    found = next((each.tensor for each in message.tensors if each.name == NAME), None)
    if found is None and not any(counts):
        return [None] * len(counts)
    array = array_of(found if found is not None else pb.Tensor(), who)
    if len(array) != sum(counts):
        raise InvalidInput(
            f"{who}: {len(array)} tokens, expected {sum(counts)} as routed_tokens together"
        )
    ends = np.cumsum(counts)
    return [
        array[end - count : end] if count else None
        for end, count in zip(ends.tolist(), counts, strict=True)
    ]


def _check(routes: Any, who: str) -> None:
    dtype = getattr(getattr(routes, "dtype", None), "name", type(routes).__name__)
    if dtype not in _DTYPES or routes.ndim != 3:
        shape = list(getattr(routes, "shape", ()))
        raise InvalidInput(
            f"{who}: {dtype} {shape}, expected an array of uint8 or uint16 [tokens, layers, k]"
        )

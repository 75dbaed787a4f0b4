"""The experts that a server chose, on the wire: those of a trajectory's first tokens.

Trajectory.routed_experts   uint8 or uint16 [R, layers, k], R at most the number of tokens
TrajectoryGroup.tensors     `expert_gaps`, [layers, tokens, k]: those of all trajectories, one after
                            the other; `Trajectory.gap_tokens` says how many each has

Gaps are a token's experts in a layer, each but the first minus the one before it. Those of sorted
experts are small numbers, which compress to three quarters of what the experts themselves do even
if a router uses all experts evenly, and layer by layer they are more alike than token by token.

0.3.0 wrote `routed_experts`, [tokens, layers, k], and `Trajectory.routed_tokens`. Such groups are
read as well, and a reader that knows only those finds that a new group has no routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from areal.errors import InvalidInput
from areal.types import Trajectory
from areal.v1 import trajectory_pb2 as pb

NAME = "expert_gaps"
PLAIN = "routed_experts"
"""What 0.3.0 wrote."""
MAX_BYTES = 48 * 1024 * 1024
"""Largest size of a group's routes. A group with more is sent without any, so that its tokens still
fit."""
_MOST = 1 << 15
"""Experts that a token may have in a layer."""
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
    """Decodes a tensor of routes, uint8 or uint16 of three dimensions; a read-only view.

    One without values has shape [0, 0, 0].

    Raises:
        InvalidInput: Its dtype, shape or size is another; `who` names it.
    """
    dtype, shape = _DTYPES.get(tensor.dtype), tuple(tensor.shape)
    if dtype is None or len(shape) != 3 or min(shape) < 0 or shape[2] > _MOST:
        raise InvalidInput(
            f"{who}: got {tensor.dtype[:20]!r} {list(shape[:8])}, expected uint8 or uint16 of "
            f"three dimensions, the last at most {_MOST}"
        )
    expected = dtype.itemsize * shape[0] * shape[1] * shape[2]
    if len(tensor.data) != expected:
        raise InvalidInput(
            f"{who}.data has {len(tensor.data)} bytes: expected {expected} for "
            f"{tensor.dtype}{list(shape)}"
        )
    # numpy refuses some shapes of no values, as 0 x 2^62 x 2^62.
    return np.frombuffer(tensor.data, dtype).reshape(shape if expected else (0, 0, 0))


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
        one.gap_tokens = 0 if routes is None else len(routes)
    gaps = _gaps_of(np.concatenate(some, dtype=_dtype_of(some)))
    tensor = message.tensors.add(name=NAME).tensor
    tensor.dtype = gaps.dtype.name
    tensor.shape.extend(gaps.shape)
    tensor.data = gaps.tobytes()


def bytes_of(trajectories: Sequence[Trajectory]) -> int:
    """Returns how many bytes the routes of a group take; those over MAX_BYTES are not sent.

    Raises:
        InvalidInput: As `tensor_of`.
    """
    return _bytes_of([routes for routes in _usable(trajectories) if routes is not None])


def _gaps_of(routes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """What is sent of routes [tokens, layers, k]: gaps [layers, tokens, k]."""
    routes = np.ascontiguousarray(routes)
    flat, gaps = routes.reshape(-1), np.empty_like(routes)
    # In one pass over all, which is faster than one for each token; what crosses them is replaced.
    np.subtract(flat[1:], flat[:-1], out=gaps.reshape(-1)[1:])
    gaps[..., :1] = routes[..., :1]
    return gaps.transpose(1, 0, 2)


def _routes_of(gaps: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The inverse of `_gaps_of`; read-only."""
    routes = np.array(gaps.transpose(1, 0, 2), order="C")
    for each in range(1, routes.shape[2]):
        routes[..., each] += routes[..., each - 1]
    routes.setflags(write=False)
    return routes


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
        routes
        if routes is not None and routes.size and len(routes) <= len(trajectory.input_ids)
        else None
        for routes, trajectory in zip(having, trajectories, strict=True)
    ]
    first = next((routes for routes in kept if routes is not None), None)
    if first is None:
        return kept
    return [r if r is not None and r.shape[1:] == first.shape[1:] else None for r in kept]


def parts_of(message: pb.TrajectoryGroup) -> list[npt.NDArray[Any] | None]:
    """Decodes the routes of each trajectory of a group; read-only.

    Raises:
        InvalidInput: As `check`.
    """
    array, counts, in_gaps = _found(message)
    routes = _routes_of(array) if in_gaps else array
    ends = np.cumsum(counts)
    return [
        routes[end - count : end] if count else None
        for end, count in zip(ends.tolist(), counts, strict=True)
    ]


def check(message: pb.TrajectoryGroup) -> None:
    """Validates the routes of a group without decoding them.

    Raises:
        InvalidInput: As `array_of`, or the trajectories have more or fewer tokens than the tensor.
    """
    _found(message)


def _found(message: pb.TrajectoryGroup) -> tuple[npt.NDArray[Any], list[int], bool]:
    """The tensor as it was sent, the tokens of each trajectory, and whether it has gaps."""
    tensors = {each.name: each.tensor for each in message.tensors}
    trajectories = message.trajectories
    in_gaps = NAME in tensors or any(each.gap_tokens for each in trajectories)
    name, field = (NAME, "gap_tokens") if in_gaps else (PLAIN, "routed_tokens")
    counts: list[int] = [getattr(each, field) for each in trajectories]
    for each, count in zip(trajectories, counts, strict=True):
        if not 0 <= count <= max(each.length, 0):
            raise InvalidInput(
                f"trajectory {each.trajectory_id!r} {field} {count}: expected 0 to {each.length}, "
                "its length"
            )
    if name not in tensors and not any(counts):
        return np.empty((0, 0, 0), np.uint8), counts, in_gaps
    who = f"group {message.task_id!r} {name}"
    array = array_of(tensors.get(name, pb.Tensor()), who)
    tokens = array.shape[1 if in_gaps else 0]
    if tokens != sum(counts):
        raise InvalidInput(f"{who}: {tokens} tokens, expected {sum(counts)} as {field} together")
    return array, counts, in_gaps


def _check(routes: Any, who: str) -> None:
    dtype = getattr(getattr(routes, "dtype", None), "name", type(routes).__name__)
    if dtype not in _DTYPES or routes.ndim != 3:
        shape = list(getattr(routes, "shape", ()))
        raise InvalidInput(
            f"{who}: {dtype} {shape}, expected an array of uint8 or uint16 [tokens, layers, k]"
        )

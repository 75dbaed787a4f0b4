"""Computes the norm of gradients on different meshes, and clips them by it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Put tensors that are spread over the same ranks into one list each."""
    found: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        spread = tensor.device_mesh if isinstance(tensor, DTensor) else None
        found.setdefault(spread, []).append(tensor)
    return list(found.values())


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the L2 norm of all gradients together, a float64 scalar, equal on all ranks.

    Collective over the ranks that each gradient is sharded over; copies count once.
    """
    squares: dict[tuple[object, tuple[int, ...]], list[Tensor]] = {}
    for gradient in gradients:
        key: tuple[object, tuple[int, ...]] = (None, ())
        if isinstance(gradient, DTensor):
            places = enumerate(gradient.placements)
            sharded = tuple(n for n, placement in places if not placement.is_replicate())
            key = (gradient.device_mesh, sharded)
        squares.setdefault(key, []).append(_local(gradient))
    total = torch.zeros((), dtype=torch.float64, device=gradients[0].device)
    for (mesh, dimensions), parts in squares.items():
        square = torch.nn.utils.get_total_norm(parts).double().square()
        for dimension in dimensions:
            dist.all_reduce(square, group=mesh.get_group(dimension))  # type: ignore[attr-defined]
        total = total + square
    return total.sqrt()


def clip(parameters: Sequence[Tensor], largest: float, norm: Tensor) -> None:
    """Scale gradients so that their norm is at most `largest`.

    Args:
        parameters: parameters that have gradients.
        largest: > 0.
        norm: the norm of all gradients.
    """
    scale(parameters, (largest / (norm + 1e-6)).clamp(max=1.0))


def scale(parameters: Iterable[Tensor], factor: Tensor | float) -> None:
    """Multiply all gradients that exist by a factor."""
    grads = [_local(p.grad) for p in parameters if p.grad is not None]
    if grads:
        exact = factor.to(grads[0].dtype) if isinstance(factor, Tensor) else factor
        torch._foreach_mul_(grads, exact)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

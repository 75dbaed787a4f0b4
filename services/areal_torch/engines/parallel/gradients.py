"""Computes the norm of gradients on different meshes, and steps with scaled ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Puts tensors that are spread over the same ranks into one list each."""
    found: dict[object, list[Tensor]] = {}
    for tensor in tensors:
        spread = tensor.device_mesh if isinstance(tensor, DTensor) else None
        found.setdefault(spread, []).append(tensor)
    return list(found.values())


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the L2 norm of all gradients together, a float64 scalar, equal on all ranks.

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


def step_with_divisor(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], divisor: Tensor, skip: Tensor
) -> None:
    """Makes a step of gradients / divisor.

    On a GPU this is one pass over memory, and the host does not wait: fused AdamW divides and skips
    by itself. A CPU divides first, because its host can read `skip` at once.

    Args:
        optimizer: Fused AdamW.
        parameters: Its parameters that have gradients.
        divisor: A scalar.
        skip: A boolean scalar: no weight, moment or number of steps changes.
    """
    grads = [_local(p.grad) for p in parameters if p.grad is not None]
    on_cpu = divisor.device.type == "cpu"
    if on_cpu or any(grad.dtype == torch.float64 for grad in grads):
        torch._foreach_div_(grads, divisor.to(grads[0].dtype))
        divisor = torch.ones_like(divisor)  # fused AdamW reads float32
    if not on_cpu:
        step_in_one_pass(optimizer, divisor, skip)
    elif not skip:
        optimizer.step()


def step_in_one_pass(optimizer: torch.optim.Optimizer, divisor: Tensor, skip: Tensor) -> None:
    """Makes a step in which fused AdamW divides or skips; see `step_with_divisor`."""
    fused: Any = optimizer  # torch's gradient scaler passes both in this way
    fused.grad_scale, fused.found_inf = divisor.float(), skip.float()
    try:
        optimizer.step()
    finally:
        del fused.grad_scale, fused.found_inf


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor

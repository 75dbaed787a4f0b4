"""Joining the job's process group and combining scalars over its ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def local_device() -> torch.device:
    """Return this rank's GPU, or the CPU on a machine without any."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def join_process_group(device: torch.device, timeout_seconds: float) -> bool:
    """Join the default process group unless someone has.

    Under torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT set) its group; else a group of one,
    without network.

    Args:
        device: NCCL carries its tensors if it is a GPU; gloo carries CPU tensors.
        timeout_seconds: deadline of every collective.

    Returns:
        Whether this call joined it, and its caller thus leaves it.
    """
    if dist.is_initialized():
        return False
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=timeout_seconds)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(
            backend,
            store=dist.HashStore(),  # type: ignore[attr-defined]
            rank=0,
            world_size=1,
            timeout=timeout,
        )
    return True


def data_group() -> Any:
    """The ranks that batches are spread over, for CPU tensors; None: this one alone."""
    return dist.group.WORLD if dist.get_world_size() > 1 else None


def reduce_scalars(scalars: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Sum scalars over the data group; names that end in `_max` are combined by maximum.

    Args:
        scalars: the same names on every rank.
    """
    names = sorted(scalars)
    if not names:
        return {}
    # One transfer from the device, then two small collectives.
    parts = [torch.as_tensor(scalars[name]).detach().to(torch.float64) for name in names]
    stacked = torch.stack([part.reshape(()) for part in parts]).cpu()
    if (group := data_group()) is not None:
        largest = [name.endswith("_max") for name in names]
        maxima = stacked[largest]
        sums = stacked[[not flag for flag in largest]]
        dist.all_reduce(sums, group=group)
        if any(largest):
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        stacked[largest] = maxima
        stacked[[not flag for flag in largest]] = sums
    return dict(zip(names, stacked.tolist(), strict=True))

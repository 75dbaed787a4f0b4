"""Joining the job's process group, the groups within it, and combining scalars over one."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from areal.config.allocation import Layout
from areal.errors import ConfigError, WaitTimeout

# An index or a UUID (GPU-, MIG-); an empty value and -1 hide all GPUs.
_NAMES_A_GPU = re.compile(r"\s*(\d|GPU-|MIG-)")


def local_device(*, gpu: bool = False) -> torch.device:
    """Returns this rank's GPU, or the CPU where no GPU was asked for.

    Args:
        gpu: The configuration asks for one. `CUDA_VISIBLE_DEVICES` asks, too, if it names one.

    Raises:
        ConfigError: A GPU was asked for, and torch cannot use it; never the CPU instead.
    """
    rank, visible = int(os.environ.get("LOCAL_RANK", "0")), os.environ.get("CUDA_VISIBLE_DEVICES")
    shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
    if torch.cuda.is_available():
        if rank < (count := torch.cuda.device_count()):
            return torch.device("cuda", rank)
        raise ConfigError(
            f"local rank {rank}: expected a GPU for each rank of a node, but torch sees {count}"
            f"{shown}"
        )
    if gpu or _NAMES_A_GPU.match(visible or ""):
        raise ConfigError(
            f"a GPU was asked for{shown}, but torch {torch.__version__} cannot use one: "
            f"{_why_no_gpu()}; see `areal doctor --gpu`, or train on CPUs with "
            "stack.gpus_per_node=0 and CUDA_VISIBLE_DEVICES="
        )
    return torch.device("cpu")


def _why_no_gpu() -> str:
    """Returns torch's reason, in one line."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "it is built for CPUs only"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())[:300]
    return "it sees none"


def join_process_group(device: torch.device, timeout_seconds: float) -> bool:
    """Joins the default process group unless someone has.

    Under torchrun (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set) it is torchrun's group;
    otherwise a group of one, without network.

    Args:
        device: NCCL carries its tensors if it is a GPU; gloo carries CPU tensors.
        timeout_seconds: Deadline of every collective.

    Returns:
        True if this call joined the group; then the caller has to leave it.
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


@dataclass(frozen=True)
class Mesh:
    """The groups of ranks that a layout creates, as seen from this rank.

    Ranks are numbered share by share, and within a share context by context:

        d2c2t2    rank       0  1  2  3  4  5  6  7
                  share      0  0  0  0  1  1  1  1    the same part of a batch
                  context    0  0  1  1  0  0  1  1    the same tokens of a micro-batch
                  tensor     0  1  0  1  0  1  0  1    the same columns of each matrix
    """

    layout: Layout
    data_group: Any
    """Ranks that hold one share of the batch each, for CPU tensors; None: there is only one
    share."""
    context_group: Any
    """Ranks that share the tokens of a micro-batch; None: only this rank."""
    shards: DeviceMesh
    """Mesh over which weights are sharded: one dimension, or two of which the first holds
    copies."""
    tensor: DeviceMesh
    experts: DeviceMesh | None
    """Mesh over which the experts of a layer are spread; None: each rank has all of them."""
    expert_shards: DeviceMesh | None
    """Mesh over which the experts of one rank are sharded; its form is that of `shards`."""

    @property
    def share(self) -> int:
        """Index of the share of a batch that this rank computes."""
        return dist.get_rank() // self.layout.per_share


def new_group(ranks: Sequence[int], what: str, timeout_s: float, backend: str | None = None) -> Any:
    """Makes a group and connects its ranks; collective over the default group.

    Args:
        ranks: Ranks of the group.
        what: The group's purpose, named in an error.
        timeout_s: Deadline for connecting, and then of every collective in it.
        backend: None: the default group's.

    Raises:
        WaitTimeout: Some of the ranks did not connect.
    """
    since = time.monotonic()
    try:
        return dist.new_group(list(ranks), timedelta(seconds=timeout_s), backend, group_desc=what)
    except RuntimeError as error:  # gloo's and the store's; the last line says which and why
        why = " ".join(str(error).split())[:300]
        others = [rank for rank in ranks if rank != dist.get_rank()]
        raise WaitTimeout(
            f"the other ranks of the group {what!r}",
            on=f"ranks {others}",
            since=since,
            hint=f"deadline {timeout_s:g} s; see the logs of these ranks; torch: {why}",
        ) from None


def make_mesh(layout: str, device: torch.device, timeout_s: float) -> Mesh:
    """Makes the groups of a layout; collective over the default group.

    Args:
        layout: As in `allocation_mode`; empty: a share for each rank.
        device: The device that computes tensors.
        timeout_s: Deadline for connecting each group, and of every collective in it.

    Raises:
        ConfigError: The layout has another number of ranks.
        WaitTimeout: Ranks of a group did not connect.
    """
    world = dist.get_world_size()
    plan = Layout.parse(layout or f"d{world}")
    plan.check_world(world)
    per_share = plan.per_share
    data = [list(range(first, world, per_share)) for first in range(per_share)]
    contexts = [
        list(range(share + lane, share + per_share, plan.tensor))
        for share in range(0, world, per_share)
        for lane in range(plan.tensor)
    ]
    copies, shards = plan.data // plan.shard, plan.shard * plan.context
    names = ("copy", "shard", "tensor")
    dense = _device_mesh(device.type, (copies, shards, plan.tensor), names, timeout_s)
    sparse = None
    if plan.experts > 1:
        sizes = (copies, shards * plan.tensor // plan.experts, plan.experts)
        names = ("copy", "expert_shard", "expert")
        sparse = _device_mesh(device.type, sizes, names, timeout_s)
    return Mesh(
        layout=plan,
        data_group=_own_group(data, "data", timeout_s),
        context_group=_own_group(contexts, "context", timeout_s),
        shards=_with_copies(dense, "shard"),
        tensor=dense["tensor"],
        experts=None if sparse is None else sparse["expert"],
        expert_shards=None if sparse is None else _with_copies(sparse, "expert_shard"),
    )


def _with_copies(mesh: DeviceMesh, name: str) -> DeviceMesh:
    return mesh["copy", name] if mesh["copy"].size() > 1 else mesh[name]


def _device_mesh(
    device: str, sizes: tuple[int, ...], names: tuple[str, ...], timeout_s: float
) -> DeviceMesh:
    """Replaces `init_device_mesh`, whose groups have torch's deadline of 10 or 30 minutes."""
    ranks = torch.arange(dist.get_world_size()).view(sizes)
    groups = [
        _group_of(ranks.movedim(number, -1).reshape(-1, size).tolist(), name, timeout_s)
        for number, (size, name) in enumerate(zip(sizes, names, strict=True))
    ]
    return DeviceMesh.from_group(groups, device, ranks, mesh_dim_names=names)


def _own_group(parts: list[list[int]], what: str, timeout_s: float) -> Any:
    """The group of this rank's part. None: it is alone in its."""
    return None if len(parts[0]) == 1 else _group_of(parts, what, timeout_s)


def _group_of(parts: list[list[int]], what: str, timeout_s: float) -> Any:
    """The group of this rank's part; every rank makes all of them."""
    if len(parts) == 1:
        return dist.group.WORLD
    own = None
    for part in parts:
        made = new_group(part, what, timeout_s)
        own = made if dist.get_rank() in part else own
    return own


def to_host(scalars: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Reads scalars, some of which may be on a device, in one transfer."""
    there = {name: value for name, value in scalars.items() if isinstance(value, Tensor)}
    found = {name: float(value) for name, value in scalars.items() if name not in there}
    if there:
        wide = [value.detach().to(torch.float64).reshape(()) for value in there.values()]
        device = next((each.device for each in wide if each.device.type != "cpu"), wide[0].device)
        read = torch.stack([each.to(device, non_blocking=True) for each in wide]).cpu().tolist()
        found |= dict(zip(there, read, strict=True))
    return found


def reduce_scalars(scalars: Mapping[str, Tensor | float], group: Any) -> dict[str, float]:
    """Sums scalars over a group; names that end in `_max` are combined by maximum.

    Args:
        scalars: The same names on every rank.
        group: For CPU tensors; None: this rank alone.
    """
    names = sorted(scalars)
    if not names:
        return {}
    # One transfer from the device, then two small collectives.
    read = to_host(scalars)
    stacked = torch.tensor([read[name] for name in names], dtype=torch.float64)
    if group is not None:
        largest = [name.endswith("_max") for name in names]
        maxima = stacked[largest]
        sums = stacked[[not flag for flag in largest]]
        dist.all_reduce(sums, group=group)
        if any(largest):
            dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        stacked[largest] = maxima
        stacked[[not flag for flag in largest]] = sums
    return dict(zip(names, stacked.tolist(), strict=True))

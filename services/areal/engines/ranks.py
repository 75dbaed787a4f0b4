"""What one process of the trainer asks of the others: every rank makes the same calls in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from areal import errors

T = TypeVar("T")


class Ranks:
    """This process's place among the trainer's, and decisions that all of them share."""

    def __init__(self, rank: int, world_size: int) -> None:
        """The process group must exist before the first call if there are several."""
        self.rank = rank
        self.world_size = world_size

    def on_rank0(self, function: Callable[[], T]) -> T:
        """Runs `function` on rank 0 and gives every rank its result, or its error."""
        if self.world_size == 1:
            return function()
        import torch.distributed as dist

        outcome: list[Any] = [None, None]
        if self.rank == 0:
            try:
                outcome[0] = function()
            except errors.ArealError as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0)
        if outcome[1] is not None:
            raise outcome[1]
        result: T = outcome[0]
        return result

    def all_ranks(self, flag: bool) -> bool:
        """Whether the flag is set on every rank."""
        return not self.any_rank(not flag)

    def any_rank(self, flag: bool) -> bool:
        """Whether the flag is set on some rank."""
        if self.world_size == 1:
            return flag
        import torch
        import torch.distributed as dist

        device = "cuda" if dist.get_backend() == "nccl" else "cpu"
        value = torch.tensor([int(flag)], device=device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value.item())

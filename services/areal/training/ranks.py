"""What one process of the trainer asks of the others: every rank makes the same calls in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from areal import errors
from areal.training.exchange import broadcast_json

T = TypeVar("T")


class Ranks:
    """This process's place among the trainer's, and decisions that all of them share."""

    def __init__(self, rank: int, world_size: int) -> None:
        """The process group must exist before the first call if there are several."""
        self.rank = rank
        self.world_size = world_size

    def on_rank0(self, function: Callable[[], T], shape: Any = Any) -> T:
        """Runs `function` on rank 0 and gives every rank its result, or its error.

        Args:
            function: Makes something that JSON can carry.
            shape: The type of that, where it is more than plain JSON (dataclasses, tuples, enums,
                paths), so that all ranks get it in this type.
        """
        if self.world_size == 1:
            return function()
        from pydantic import TypeAdapter

        shaped = TypeAdapter(shape)
        outcome: dict[str, Any] = {}
        if self.rank == 0:
            try:
                outcome["result"] = shaped.dump_python(function(), mode="json")
            except errors.ArealError as error:
                outcome["error"] = _describe(error)
        outcome = broadcast_json(outcome)
        if "error" in outcome:
            raise _restore(outcome["error"])
        result: T = shaped.validate_python(outcome["result"])
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


def _describe(error: errors.ArealError) -> dict[str, str]:
    return {
        "kind": type(error).__name__,
        "text": str(error),
        "traceback": getattr(error, "traceback", ""),
    }


def _restore(described: dict[str, str]) -> errors.ArealError:
    """The error with its class and its sentence; classes that build theirs must not build again."""
    kind = getattr(errors, described["kind"], errors.ArealError)
    error: errors.ArealError = kind.__new__(kind, described["text"])
    if isinstance(error, errors.WorkflowError):
        error.traceback = described["traceback"]
    return error

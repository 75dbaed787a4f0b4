"""Exchanges data between the trainer's ranks: every rank makes the same calls in order.

They exchange JSON: a length, then bytes, in tensors. torch's own `*_object` collectives would
unpickle a message and so run any code in it; these carry data only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from areal import errors

T = TypeVar("T")

MAX_BYTES = 256 * 1024 * 1024
"""A manifest of 100,000 groups is about 10 MB."""


class Ranks:
    """This process's place among the trainer's, and decisions that all of them share."""

    def __init__(self, rank: int, world_size: int) -> None:
        """The process group must exist before the first call if there are several."""
        self.rank = rank
        self.world_size = world_size
        self._deciding = False

    def on_rank0(self, function: Callable[[], T], shape: Any = Any) -> T:
        """Runs `function` on rank 0 and gives every rank its result, or its error.

        Within `function` further calls of this kind run at once: only rank 0 is there.

        Args:
            function: Returns a value that JSON can hold.
            shape: The value's type if it is more than plain JSON (dataclasses, tuples, enums,
                paths), so that all ranks get this type.
        """
        if self.world_size == 1 or self._deciding:
            return function()
        from pydantic import TypeAdapter

        shaped = TypeAdapter(shape)
        outcome: dict[str, Any] = {}
        if self.rank == 0:
            self._deciding = True
            try:
                outcome["result"] = shaped.dump_python(function(), mode="json")
            except errors.ArealError as error:
                outcome["error"] = _describe(error)
            finally:
                self._deciding = False
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

        value = torch.tensor([int(flag)], device=_device())
        dist.all_reduce(value, op=dist.ReduceOp.MAX)
        return bool(value.item())


def broadcast_json(value: Any) -> Any:
    """Returns rank 0's value on every rank; other ranks' values are ignored. Collective.

    Raises:
        CapacityExceeded: Raised on every rank if the value is longer than MAX_BYTES as JSON.
    """
    import torch
    import torch.distributed as dist

    device = _device()
    data = _encode(value) if dist.get_rank() == 0 else b""
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    dist.broadcast(size, src=0)
    length = _checked(int(size.item()))
    content = _tensor(data, length, device)
    dist.broadcast(content, src=0)
    return json.loads(_bytes(content, length))


def gather_json(value: Any) -> list[Any]:
    """Returns the values of all ranks, in order, on every rank. Collective.

    Raises:
        CapacityExceeded: Raised on every rank if a value is longer than MAX_BYTES as JSON.
    """
    import torch
    import torch.distributed as dist

    device, ranks = _device(), range(dist.get_world_size())
    data = _encode(value)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in ranks]
    dist.all_gather(sizes, torch.tensor([len(data)], dtype=torch.int64, device=device))
    lengths = [_checked(int(size.item())) for size in sizes]
    contents = [_tensor(b"", max(lengths), device) for _ in ranks]
    dist.all_gather(contents, _tensor(data, max(lengths), device))
    return [json.loads(_bytes(c, n)) for c, n in zip(contents, lengths, strict=True)]


def _device() -> str:
    """Returns the device from which the default backend can take tensors."""
    import torch.distributed as dist

    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _checked(length: int) -> int:
    if length > MAX_BYTES:
        raise errors.CapacityExceeded(
            f"a message of {length} bytes between trainer ranks: at most {MAX_BYTES} are sent"
        )
    return length


def _tensor(data: bytes, length: int, device: str) -> Any:
    """Returns `data` at the start of a uint8 tensor of that length."""
    import torch

    content = torch.zeros(length, dtype=torch.uint8)
    if data:
        content[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return content.to(device)


def _bytes(content: Any, length: int) -> bytes:
    return bytes(content[:length].cpu().numpy().tobytes())


def _describe(error: errors.ArealError) -> dict[str, str]:
    return {
        "kind": errors.name_of(error),
        "text": str(error),
        "traceback": getattr(error, "traceback", ""),
    }


def _restore(described: dict[str, str]) -> errors.ArealError:
    """The error that rank 0 described."""
    error = errors.restore(described["kind"], described["text"])
    if isinstance(error, errors.WorkflowError):
        error.traceback = described["traceback"]
    return error

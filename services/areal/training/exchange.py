"""JSON between the ranks of one job: a length, then bytes, in tensors. Never pickle.

torch's own `*_object` collectives would run whatever code a message brings; these carry data only.
All functions are collective: every rank calls them in the same order.
"""

from __future__ import annotations

import json
from typing import Any

from areal.errors import CapacityExceeded

MAX_BYTES = 256 * 1024 * 1024
"""A manifest of 100,000 groups is about 10 MB."""


def broadcast_json(value: Any) -> Any:
    """What rank 0 gave, on every rank; what the others give is not looked at.

    Raises:
        CapacityExceeded: On every rank, if it is longer than MAX_BYTES as JSON.
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
    """What each rank gave, by rank, on every rank.

    Raises:
        CapacityExceeded: On every rank, if one is longer than MAX_BYTES as JSON.
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
    """Where the default backend can take tensors from."""
    import torch.distributed as dist

    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _checked(length: int) -> int:
    if length > MAX_BYTES:
        raise CapacityExceeded(
            f"a message of {length} bytes between trainer ranks: at most {MAX_BYTES} are sent"
        )
    return length


def _tensor(data: bytes, length: int, device: str) -> Any:
    """`data` at the start of a uint8 tensor of that length."""
    import torch

    content = torch.zeros(length, dtype=torch.uint8)
    if data:
        content[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return content.to(device)


def _bytes(content: Any, length: int) -> bytes:
    return bytes(content[:length].cpu().numpy().tobytes())

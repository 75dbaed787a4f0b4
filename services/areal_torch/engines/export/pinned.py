"""Copies tensors to host memory and digests them while the next ones are gathered.

bucket n+1: gathered ──┐          a GPU's copies go through two pinned buffers in turn, at the
bucket n:   copied ────┤          speed of the bus; on a CPU the tensor itself is taken over
bucket n-1: digested ──┘
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self, cast

import torch
from torch import Tensor

from areal.weights.safetensors import HostTensor, digest_of

_MAX_THREADS = 4
_ALIGNED = 16
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


@dataclass
class _Slot:
    """A pinned buffer, and what still reads it."""

    buffer: Tensor | None = None
    readers: list[Future[HostTensor]] = field(default_factory=list)

    def room(self, size: int) -> Tensor:
        """Returns pinned memory of this size, once no one reads its previous content."""
        for reader in self.readers:
            reader.result()
        self.readers = []
        if self.buffer is None or self.buffer.numel() < size:
            self.buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self.buffer


class ToHost:
    """Collects the tensors of one export.

    Example:
        >>> with ToHost() as host:
        ...     for bucket in gathering.buckets():
        ...         host.add(bucket)
        ...     tensors = host.result()
    """

    def __init__(self) -> None:
        threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
        self._pool = ThreadPoolExecutor(threads, "export")
        self._slots = [_Slot(), _Slot()]
        self._made: list[Future[HostTensor]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._pool.shutdown(cancel_futures=kind is not None)

    def add(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Takes over tensors that no one else will change; returns before they are copied."""
        on_gpu = [tensor for _, tensor in tensors if tensor.is_cuda]
        slot, copied = self._slots[0], None
        staged = dict[int, Tensor]()
        if on_gpu:
            self._slots.reverse()
            room, begin = slot.room(sum(_padded(tensor) for tensor in on_gpu)), 0
            for tensor in on_gpu:
                place = room[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                staged[id(tensor)] = place.copy_(tensor, non_blocking=True)
                begin += _padded(tensor)
            copied = cast("Any", torch.cuda).Event()
            copied.record()
        for name, tensor in tensors:
            pinned = staged.get(id(tensor))
            if pinned is None:
                self._made.append(self._pool.submit(_host_tensor, name, tensor))
                continue
            made = self._pool.submit(_from_pinned, name, pinned, copied)
            slot.readers.append(made)
            self._made.append(made)

    def result(self) -> tuple[HostTensor, ...]:
        """Returns all tensors with their digests, in the order they were added."""
        return tuple(made.result() for made in self._made)


def _padded(tensor: Tensor) -> int:
    return int(tensor.nbytes + -tensor.nbytes % _ALIGNED)


def _from_pinned(name: str, pinned: Tensor, copied: Any) -> HostTensor:
    copied.synchronize()
    return _host_tensor(name, pinned.clone(memory_format=torch.contiguous_format))


def _host_tensor(name: str, tensor: Tensor) -> HostTensor:
    """A CPU tensor as bytes; shares its memory."""
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    return HostTensor(name, tuple(tensor.shape), _NAMES[tensor.dtype], data, digest_of(data))

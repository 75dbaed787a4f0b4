"""Moves a model's states to host memory and back, so that others can use the GPU meanwhile.

What moves is the memory behind the tensors. The tensors stay the same objects, with the same shapes
and devices, so FSDP, the optimizer and everything else that refers to them notices nothing. While
their memory is away they must not be read.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn


@dataclass
class _Copy:
    """A tensor's memory, and where its content is kept."""

    storage: torch.UntypedStorage
    host: Tensor


class HostStates:
    """The host memory for one model's states; the first move allocates it, later ones use it again.

    Example:
        >>> states = HostStates(torch.device("cpu"))
        >>> weight = torch.ones(3)
        >>> states.to_host([weight])
        >>> states.to_device()
        >>> weight.tolist()
        [1.0, 1.0, 1.0]
    """

    def __init__(self, device: torch.device) -> None:
        """Moves nothing yet.

        Args:
            device: Where the model computes. Tensors elsewhere (offloaded ones) are not moved.
        """
        self._device = device
        self._copies: list[_Copy] = []
        self._kept: dict[int, Tensor] = {}

    @property
    def away(self) -> bool:
        """Whether the states are in host memory."""
        return bool(self._copies)

    def to_host(self, tensors: Iterable[Tensor]) -> int:
        """Copies tensors to host memory and frees theirs; returns once that is done.

        Args:
            tensors: Whole or sharded (DTensor). Several may share memory.

        Returns:
            Bytes moved; 0 if they are away already.
        """
        if self.away:
            return 0
        storages = dict[int, torch.UntypedStorage]()
        for tensor in tensors:
            local = _local(tensor)
            if local.device.type == self._device.type:
                storage = local.untyped_storage()
                # Memory that torch did not allocate (a mapped file) cannot be freed, and stays.
                if storage.nbytes() and storage.resizable():
                    storages[storage._cdata] = storage
        if not storages:
            return 0
        for key, storage in storages.items():
            host = self._kept.get(key)
            if host is None or host.numel() != storage.nbytes():
                pinned = self._device.type == "cuda"
                host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            host.copy_(_bytes(storage), non_blocking=True)
            self._copies.append(_Copy(storage, host))
        self._kept = {copy.storage._cdata: copy.host for copy in self._copies}
        self._synchronize()
        for copy in self._copies:
            copy.storage.resize_(0)
        if self._device.type == "cuda":
            gc.collect()  # what the last step left in reference cycles
            torch.cuda.empty_cache()
        return sum(copy.host.numel() for copy in self._copies)

    def to_device(self) -> None:
        """Allocates the memory again and fills it; returns once that is done."""
        copies, self._copies = self._copies, []
        for copy in copies:
            copy.storage.resize_(copy.host.numel())
            _bytes(copy.storage).copy_(copy.host, non_blocking=True)
        if copies:
            self._synchronize()

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            cast("Any", torch.cuda).synchronize(self._device)


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[Tensor]:
    """Returns weights, buffers, gradients and the optimizer's state: what outlives a step."""
    weights = list(model.parameters())
    states = optimizer.state.values() if optimizer is not None else ()
    return [
        *weights,
        *model.buffers(),
        *(weight.grad for weight in weights if weight.grad is not None),
        *(value for state in states for value in state.values() if isinstance(value, Tensor)),
    ]


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return cast("Tensor", tensor.to_local()) if hasattr(tensor, "to_local") else tensor


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    """Returns a whole storage as uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

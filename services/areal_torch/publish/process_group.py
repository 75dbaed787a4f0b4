"""A process group apart from torch.distributed's default one, created like SGLang's update groups.

Rendezvous keys and order of collectives are those of SGLang's `init_weights_update_group`, so each
side may be SGLang's or ours. Nothing is registered with torch.distributed: a group that failed is
dropped, with its connections, and no global state remembers it. Every wait ends by its deadline.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from areal.errors import ArealError

if TYPE_CHECKING:
    from torch import Tensor


class GroupError(ArealError):
    """Members are missing, late or gone; the group cannot be used any longer."""


class ProcessGroup:
    """Rank 0 sends, the others receive.

    Example:
        >>> group = ProcessGroup.join("10.0.0.3", 41873, 1, 3, "areal-7f3a91", "gloo", 12.0)
        >>> group.broadcast([tensor], 30.0)
    """

    def __init__(
        self, store: Store, rank: int, size: int, name: str, backend: str, own: str, timeout: float
    ) -> None:
        self._rank, self._name = rank, name
        self._store = store  # the first rank's serves the others
        self.device = torch.device("cuda" if backend == "nccl" else "cpu")
        keys = PrefixStore(f"{name}/", PrefixStore(name, store))
        keys = PrefixStore(f"{self.device.type}/", keys)
        self._group: Any
        if backend == "nccl":
            self._group = dist.ProcessGroupNCCL(keys, rank, size, dist.ProcessGroupNCCL.Options())
        else:
            gloo = cast("Any", dist.ProcessGroupGloo)
            options = gloo._Options()
            options._timeout = timedelta(seconds=timeout)
            # Not what the host's name means to itself: that may be its loopback.
            options._devices = [gloo.create_device(hostname=own)]
            self._group = gloo(keys, rank, size, options)

    @classmethod
    def lead(
        cls, listener: socket.socket, size: int, name: str, backend: str, timeout: float
    ) -> ProcessGroup:
        """Creates the group as rank 0, once all others have connected to `listener`; closes it.

        Raises:
            GroupError: Some ranks did not connect in time.
        """
        host, port = listener.getsockname()[:2]
        descriptor = listener.detach()
        return cls._open(
            host, port, 0, size, name, backend, timeout, is_master=True,
            master_listen_fd=descriptor,
        )  # fmt: skip

    @classmethod
    def join(
        cls, host: str, port: int, rank: int, size: int, name: str, backend: str, timeout: float
    ) -> ProcessGroup:
        """Joins the group as another rank.

        Raises:
            GroupError: Rank 0 does not answer, or some ranks did not connect in time.
        """
        return cls._open(host, port, rank, size, name, backend, timeout, is_master=False)

    @classmethod
    def _open(
        cls, host: str, port: int, rank: int, size: int, name: str, backend: str,
        timeout: float, **options: Any,
    ) -> ProcessGroup:  # fmt: skip
        since, c10d = time.monotonic(), cast("Any", dist)
        try:
            store = c10d.TCPStore(host, port, size, timeout=timedelta(seconds=timeout), **options)
            return cls(store, rank, size, name, backend, address_towards(host, port), timeout)
        except (RuntimeError, ValueError, OSError) as error:
            raise GroupError(
                f"group {name}: rank {rank} of {size} waited {time.monotonic() - since:.1f} s for "
                f"the others at {host}:{port}: {_first_line(error)}"
            ) from None

    def broadcast(self, tensors: Sequence[Tensor], timeout: float) -> None:
        """Fills the tensors of every rank but 0 with those of rank 0, in place.

        Raises:
            GroupError: A member is gone or late; the tensors' contents are undefined.
        """
        since = time.monotonic()
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout)
        # NCCL's waits only order streams; its end is forced from outside.
        watchdog = threading.Timer(timeout, self._abort)
        watchdog.start()
        try:
            works = [self._group.broadcast([tensor], options) for tensor in tensors]
            for work in works:
                left = timeout - (time.monotonic() - since)
                work.wait(timedelta(seconds=max(0.001, left)))
            if self.device.type == "cuda":
                torch.cuda.synchronize()
        except RuntimeError as error:
            raise GroupError(
                f"group {self._name}: rank {self._rank}: a broadcast of {len(tensors)} tensors "
                f"failed after {time.monotonic() - since:.1f} s: {_first_line(error)}"
            ) from None
        finally:
            watchdog.cancel()

    def _abort(self) -> None:
        if self.device.type == "cuda":
            self._group.abort()


def address_towards(host: str, port: int) -> str:
    """Returns this machine's address on the route to another one; sends nothing.

    Raises:
        OSError: The name cannot be resolved, or there is no route.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]

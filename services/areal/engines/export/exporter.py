"""Exports of the weights beside the next step.

    main thread:  step n ─ begin ──────── forward, backward ─ wait_gathered ─ optimizer ─ step n+1
    own thread:             └ cast, gather (all ranks), digest ┘ write, announce (rank 0) ─┘

The weights are read in place: a copy would cost two bytes a parameter, over all ranks, at the peak
of the next step's memory. So the optimizer waits until they have been gathered, which is over long
before a backward pass of any size; it never waits for a disk, a network or a server, and no rank
waits in a collective for rank 0 to be through with those. Collectives have a group of their own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from areal.engines.export.buckets import Gathering, Held
from areal.engines.export.pinned import ToHost
from areal.errors import WaitTimeout
from areal.weights.safetensors import HostTensor

Deliver = Callable[[tuple[HostTensor, ...]], None]


class Exporter:
    """One export at a time; `begin` and `gathering` are collective.

    Args:
        hf: the model.
        source: its directory.
        device: of the model.
        timeout_s: deadline of each exchange between ranks.
    """

    def __init__(self, hf: Any, source: Path, device: torch.device, timeout_s: float) -> None:
        self._hf, self._source, self._device, self._timeout_s = hf, source, device, timeout_s
        self._group = dist.new_group(
            backend="nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout_s),
        )
        self._held: Held | None = None
        self._gathered = threading.Event()
        self._gathered.set()
        self._since = 0.0
        self.waited_s = 0.0
        """What `wait_gathered` has cost the training thread, in all."""

    def gathering(self, dtype: str | None) -> Gathering:
        """The weights as they are, once no other export reads them."""
        self.wait_gathered()
        self._held = self._held or Held.of(self._hf, self._source)
        return Gathering(self._hf, self._source, self._held, dtype, self._group)

    def begin(self, dtype: str | None, deliver: Deliver) -> Future[None]:
        """Starts to gather the weights; on rank 0 `deliver` is then given all of them.

        Returns:
            Done, on rank 0, when `deliver` has returned, or with its error; elsewhere when this
            rank has sent its pieces.
        """
        work, ready = self.gathering(dtype), None
        if self._device.type == "cuda":
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record()
        self._gathered.clear()
        self._since = time.monotonic()
        done: Future[None] = Future()

        def run() -> None:
            try:
                try:
                    tensors = self._gather(work, ready)
                finally:
                    self._gathered.set()
                if dist.get_rank() == 0:
                    deliver(tensors)
            except BaseException as error:  # the training thread raises it
                done.set_exception(error)
            else:
                done.set_result(None)

        # Not one that the interpreter waits for at its end: a dead volume would hold it.
        threading.Thread(target=run, name="export", daemon=True).start()
        return done

    def wait_gathered(self) -> None:
        """Waits until the weights may change.

        Raises:
            WaitTimeout: another rank has not taken part in time.
        """
        if self._gathered.is_set():
            return
        since = time.monotonic()
        if not self._gathered.wait(self._timeout_s):
            raise WaitTimeout("the gathering of weights", on="the other ranks", since=self._since)
        self.waited_s += time.monotonic() - since

    def _gather(self, work: Gathering, ready: Any) -> tuple[HostTensor, ...]:
        stream = None
        if ready is not None:
            torch.cuda.set_device(self._device)
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_event(ready)
        with torch.cuda.stream(stream) if stream is not None else nullcontext(), ToHost() as host:
            for bucket in work.buckets():
                host.add(bucket)
            if stream is not None:
                stream.synchronize()
            self._gathered.set()
            return host.result()

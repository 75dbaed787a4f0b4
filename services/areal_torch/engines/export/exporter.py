"""Exports weights while the next step runs.

    main thread:  step n ─ begin ──────── forward, backward ─ wait_gathered ─ optimizer ─ step n+1
    own thread:             └ cast, gather (all ranks), digest ┘ write, announce (rank 0) ─┘

The weights are read in place: a copy would cost two bytes a parameter, over all ranks, at the peak
of the next step's memory. So the optimizer waits until they have been gathered, which ends long
before a large model's backward pass. It never waits for a disk, and no rank waits in a collective
while rank 0 writes. Collectives have their own group.

For a broadcast the weights are gathered a second time, when their digests are known and the servers
have joined. The buckets are sent from the device, and the optimizer waits for that as well.

Several GPUs gather in order instead: `begin` itself launches all exchanges, on a stream of their
own, and only then returns. NCCL's kernels occupy a GPU until their peers have started the same
ones. If one rank launched an exchange before a layer's all-gather and another rank after it, each
GPU could wait for the other indefinitely. A thread cannot promise an order, but the program of the
training thread is the same on all ranks. This costs the copy to host memory before the next step,
and a broadcast sends what is in host memory, because a second gathering would be out of order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from areal.errors import WaitTimeout
from areal.weights.publisher import Again
from areal.weights.safetensors import HostTensor
from areal_torch.engines.export.buckets import Gathering, Held
from areal_torch.engines.export.pinned import ToHost

Deliver = Callable[[tuple[HostTensor, ...], Again | None], None]


class Exporter:
    """One export at a time; `begin` and `gathering` are collective.

    Args:
        hf: The model.
        source: Its directory.
        device: The model's device.
        timeout_s: Deadline of each exchange between ranks.
    """

    def __init__(self, hf: Any, source: Path, device: torch.device, timeout_s: float) -> None:
        self._hf, self._source, self._device, self._timeout_s = hf, source, device, timeout_s
        self._group = dist.new_group(
            backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout_s),
        )
        self._in_order = device.type == "cuda" and dist.get_world_size() > 1
        self._held: dict[bool, Held] = {}
        self._gathered = threading.Event()
        self._gathered.set()
        self._since = 0.0
        self.waited_s = 0.0
        """Seconds that `wait_gathered` has held up the training thread, in total."""

    def gathering(self, dtype: str | None, *, adapters: bool = False) -> Gathering:
        """Returns the current weights, or adapters, to gather, once no other export reads them."""
        self.wait_gathered()
        if adapters not in self._held:
            self._held[adapters] = Held.of(self._hf, self._source, adapters=adapters)
        held = self._held[adapters]
        return Gathering(self._hf, self._source, held, dtype, self._group, adapters=adapters)

    def begin(
        self,
        dtype: str | None,
        deliver: Deliver,
        *,
        twice: bool = False,
        adapters: bool = False,
    ) -> Future[None]:
        """Starts to gather the weights; on rank 0 `deliver` then gets all of them.

        Args:
            dtype: To cast floating tensors to; None: as they are.
            deliver: Called in a thread with the tensors and, with `twice`, a function that gathers
                them again.
            twice: The same on every rank: `deliver` may have them gathered a second time, unless
                several GPUs gather in order; it gets None then.
            adapters: Only the adapters, by peft's names; the same on every rank.

        Returns:
            A future. On rank 0 it is done when `deliver` has returned or raised; on other ranks,
            when this rank has sent its pieces.
        """
        work, ready = self.gathering(dtype, adapters=adapters), None
        if self._device.type == "cuda":
            ready = cast("Any", torch.cuda).Event()
            ready.record()
        host = ToHost()
        launched = self._launch(work, ready, host) if self._in_order else None
        twice = twice and not self._in_order
        self._gathered.clear()
        self._since = time.monotonic()
        done: Future[None] = Future()

        def run() -> None:
            again = _Repeat(self, work, ready) if twice else None
            try:
                with host:
                    end = launched if self._in_order else self._launch(work, ready, host)
                    if end is not None:
                        end.synchronize()
                    if again is None:
                        self._gathered.set()
                    tensors = host.result()
                if dist.get_rank() == 0:
                    deliver(tensors, again)
                elif again is not None:
                    again.follow()
            except BaseException as error:  # the training thread raises it
                done.set_exception(error)
            else:
                done.set_result(None)
            finally:
                # A second gathering may outlive `deliver`: it says itself when it is over.
                if again is None or dist.get_rank() != 0:
                    self._gathered.set()
                else:
                    again.skip()

        # Not one that the interpreter waits for at its end: a dead volume would hold it.
        threading.Thread(target=run, name="export", daemon=True).start()
        return done

    def wait_gathered(self) -> None:
        """Waits until the weights may change.

        Raises:
            WaitTimeout: Another rank has not taken part in time.
        """
        if self._gathered.is_set():
            return
        since = time.monotonic()
        if not self._gathered.wait(self._timeout_s):
            raise WaitTimeout("the gathering of weights", on="the other ranks", since=self._since)
        self.waited_s += time.monotonic() - since

    def _launch(self, work: Gathering, ready: Any, host: ToHost) -> Any:
        """Gathers all buckets and have them copied; returns a GPU's event after the last."""
        with self.stream(ready):
            for bucket in work.buckets():
                host.add(bucket)
            if ready is None:
                return None
            end = cast("Any", torch.cuda).Event()
            end.record()
            return end

    @contextmanager
    def stream(self, ready: Any) -> Iterator[None]:
        """Returns this thread's own stream, which starts after `ready` of the training stream."""
        if ready is None:
            yield
            return
        torch.cuda.set_device(self._device)
        own = cast("Any", torch.cuda).Stream()
        own.wait_event(ready)
        with torch.cuda.stream(own):
            yield

    def tell(self, repeats: bool | None) -> bool:
        """Broadcasts from rank 0 whether there is a second gathering (other ranks pass None)."""
        if dist.get_world_size() == 1:
            return bool(repeats)
        word = torch.tensor([int(bool(repeats))])
        dist.broadcast(word, 0, group=self._group)
        return bool(word.item())

    def gathered(self) -> None:
        """Notes that the weights may change."""
        self._gathered.set()


class _Repeat:
    """The second gathering of an export; see `Again`. Rank 0 says whether it takes place."""

    def __init__(self, exporter: Exporter, work: Gathering, ready: Any) -> None:
        self._exporter, self._work, self._ready = exporter, work, ready
        self._open = threading.Lock()

    def buckets(self) -> Generator[list[tuple[str, Tensor]]]:
        """See `Again`: closed early, it still gathers the rest, which the others send."""
        if not self._open.acquire(blocking=False):
            return
        try:
            self._exporter.tell(True)
            with self._exporter.stream(self._ready):
                buckets = self._work.buckets()
                try:
                    for bucket in buckets:  # noqa: UP028 - closing this one must not close the other
                        yield bucket
                finally:
                    for _ in buckets:
                        pass
                    if self._ready is not None:
                        torch.cuda.current_stream().synchronize()
        finally:
            self._exporter.gathered()

    def skip(self) -> None:
        """See `Again`."""
        if self._open.acquire(blocking=False):
            try:
                self._exporter.tell(False)
            finally:
                self._exporter.gathered()

    def follow(self) -> None:
        """Sends the pieces again, on ranks other than 0, if rank 0 asks for them."""
        if self._exporter.tell(None):
            with self._exporter.stream(self._ready):
                for _ in self._work.buckets():
                    pass

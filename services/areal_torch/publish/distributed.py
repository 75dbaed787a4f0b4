"""`distributed`: the trainer's rank 0 broadcasts a version to the servers, and stores it meanwhile.

    publish ──> offer to weight-sync ──> seats?
                  │ some                    │ none: store, announce
                  v                         v
       thread: join, broadcast        main: store, announce
                  └────────── both have ended, by their deadlines ──────────┘

The servers that serve get the weights from this process's device (`publisher.Again`), before
anything is written.
New servers, and those that the broadcast did not reach, read the stored version. A failed broadcast
takes at most its deadline and never loses the version; the next one uses a new group, with the
servers that serve then. After three failures in a row, some versions are only stored before the
next try: twice as many after each further failure, at most 64.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from areal.chassis.logging import get_logger
from areal.errors import ArealError
from areal.weights.broadcast import DTYPES, JOIN_S, Offer, Seats, bucket_s, buckets
from areal.weights.manifest import PolicyVersion, WeightTensor, assemble_manifest
from areal.weights.publisher import NewVersion, Publisher, TransportError, in_threads, patience_s
from areal_torch.publish.process_group import ProcessGroup, address_towards

_REST_AFTER = 3
_LONGEST_REST = 64
_GRACE_S = 5.0


class DistributedPublisher:
    """Broadcasts versions to the serving servers; see `Publisher`."""

    name = "distributed"

    def __init__(
        self,
        stored: Publisher,
        offer: Callable[[PolicyVersion, Offer], Seats],
        root: Path,
        weight_sync: str,
    ) -> None:
        """Broadcasts beside another publisher.

        Args:
            stored: Keeps every version.
            offer: Announces the broadcast to weight-sync, which answers who takes part.
            root: Folder that versions are named below.
            weight_sync: Weight-sync's host:port; servers reach this process at the address used to
                reach it.
        """
        self._stored = stored
        self._offer = offer
        self._root = root
        host, _, port = weight_sync.rpartition(":")
        self._towards = host.strip("[]"), int(port)
        self._backend = "nccl" if torch.cuda.is_available() else "gloo"
        self._group: tuple[str, ProcessGroup] | None = None
        self._failures = 0
        self._resting = 0
        """Versions that are only stored before a broadcast is tried again."""
        self._log = get_logger(__name__)

    def publish(self, new: NewVersion, announce: Callable[[PolicyVersion], None]) -> PolicyVersion:
        """Broadcasts and stores at once; returns when both have ended."""
        if self._resting:
            self._resting -= 1
            return self._store(new, announce)
        manifest, ended = self._describe(new), queue.SimpleQueue[str]()
        try:
            parts = list(buckets(manifest.tensors))
            listener = self._listen()
        except ArealError as error:
            self._failed(new.version, str(error))
            return self._store(new, announce)
        with listener:
            host, port = listener.getsockname()[:2]
            group = self._group[0] if self._group else ""
            seats = self._offer(manifest, Offer(host, port, self._backend, group))
            if not seats.world_size:
                return self._store(new, announce)
            work = threading.Thread(
                target=lambda: ended.put(self._send(new, parts, seats, listener)),
                name="broadcast",
                daemon=True,  # nothing but its deadlines ends it
            )
            work.start()
            try:
                return self._stored.publish(new, announce)
            finally:
                self._settle(new.version, ended, JOIN_S + sum(map(bucket_s, parts)) + _GRACE_S)

    def _store(self, new: NewVersion, announce: Callable[[PolicyVersion], None]) -> PolicyVersion:
        if new.again is not None:
            new.again.skip()
        return self._stored.publish(new, announce)

    def _listen(self) -> socket.socket:
        try:
            address = address_towards(*self._towards)
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            return socket.create_server((address, 0), family=family)
        except OSError as error:
            where = "{}:{}".format(*self._towards)
            raise TransportError(f"endpoints.weight_sync {where}: {error}") from None

    def _describe(self, new: NewVersion) -> PolicyVersion:
        """The manifest of a version without files, its tensors in the order that they are sent."""
        digests = in_threads(lambda tensor: tensor.digest, new.tensors)
        tensors = [
            WeightTensor(t.name, t.shape, t.dtype, digest)
            for t, digest in zip(new.tensors, digests, strict=True)
        ]
        whole = assemble_manifest(new.model, new.version, new.incarnation, [], tensors)
        kept = {tensor.name for tensor in whole.tensors}
        sent = tuple(tensor for tensor in tensors if tensor.name in kept)
        return replace(whole, tensors=sent, files=(), path=str(self._root / new.name))

    def _send(
        self,
        new: NewVersion,
        parts: Sequence[Sequence[WeightTensor]],
        seats: Seats,
        listener: socket.socket,
    ) -> str:
        """Broadcasts a version; returns why it failed, or ""."""
        held, self._group = self._group, None
        names = {tensor.name for part in parts for tensor in part}
        try:
            if held is None or held[0] != seats.group:
                held = None  # its connections close before the next are made
                group = ProcessGroup.lead(
                    listener, seats.world_size, seats.group, self._backend, JOIN_S
                )
            else:
                group = held[1]
            with closing(new.again.buckets() if new.again else _from_host(new, parts)) as buckets:
                for bucket in buckets:
                    sent = [t.to(group.device).contiguous() for name, t in bucket if name in names]
                    group.broadcast(sent, patience_s(sum(tensor.nbytes for tensor in sent)))
        except Exception as error:  # whatever it is, the trainer waits for this answer
            if new.again is not None:
                new.again.skip()
            return str(error) or type(error).__name__
        self._group = seats.group, group
        return ""

    def _settle(self, version: int, ended: queue.SimpleQueue[str], deadline: float) -> None:
        try:
            cause = ended.get(timeout=deadline)
        except queue.Empty:
            cause = f"the broadcast did not end within {deadline:.0f} s and was abandoned"
            self._failures = max(self._failures, _REST_AFTER - 1)
        if cause:
            self._failed(version, cause)
        else:
            self._failures = 0

    def _failed(self, version: int, cause: str) -> None:
        self._failures += 1
        if self._failures >= _REST_AFTER:
            self._resting = min(_LONGEST_REST, 2**self._failures)
        if self._backend == "nccl":  # the servers' own has to be the same, and to be set up so
            here = ".".join(map(str, cast("Any", torch.cuda.nccl).version()))
            cause = f"{cause} (NCCL {here} here)"
        self._log.warning(
            "transport_fell_back",
            version=version,
            to=self._stored.name,
            cause=f"distributed: {cause}"[:500],
            tried_again_after_versions=self._resting,
        )


def _from_host(
    new: NewVersion, parts: Sequence[Sequence[WeightTensor]]
) -> Generator[Sequence[tuple[str, torch.Tensor]]]:
    """Tensors over the bytes of a version that is in memory only."""
    hosts = {tensor.name: tensor for tensor in new.tensors}
    for part in parts:
        yield [
            (
                t.name,
                torch.frombuffer(hosts[t.name].data, dtype=getattr(torch, DTYPES[t.dtype])).view(
                    t.shape
                ),
            )
            for t in part
        ]

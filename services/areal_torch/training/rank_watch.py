"""Notices ranks that died or stopped, so that no collective waits for them for long.

    every rank ── beat, each second ──> the job's store (torchrun's TCPStore)
    rank 0     <── all beats ──┘
    the others <── rank 0's beat

A rank without a beat for RANK_SILENT_S (stopped, swapped out, its machine away) ends the job: the
rank that notices logs it, kills the silent rank if it is on the same machine, and exits; torchrun
ends the rest.
Beats come from a thread: a long computation, a long wait for a batch, or a long checkpoint does
not stop them. A rank that was killed is noticed by torchrun itself, within a second.

| consumes        | waits for         | unblocked by                                  |
|-----------------|-------------------|-----------------------------------------------|
| a second's beat | the store         | its answer, or STORE_TIMEOUT_S                |
| beats of others | a beat that moves | the rank; after RANK_SILENT_S the job's end   |
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import psutil

from areal.chassis.logging import get_logger
from areal_torch.training.ranks import gather_json

BEAT_S = 1.0
RANK_SILENT_S = 30.0
STORE_TIMEOUT_S = 5.0
_CONNECT_TIMEOUT_S = 60.0
_LEFT = b"left"


class RankWatch:
    """A thread that beats for this rank and watches others."""

    def __init__(self, rank: int, world_size: int) -> None:
        """Collective: exchanges hosts and pids. Call after the process group was joined.

        Raises:
            RuntimeError: The job's store does not answer.
        """
        self._rank = rank
        everyone = gather_json([socket.gethostname(), os.getpid()])
        self._neighbours = [(str(host), int(pid)) for host, pid in everyone]
        self._watched = [r for r in range(world_size) if r != rank] if rank == 0 else [0]
        self._silent = dict.fromkeys(self._watched, 0.0)
        self._last: dict[int, bytes] = {}
        self._stopping = threading.Event()
        self._store = _connect()  # here, so that a rank without it ends instead of watching no one
        self._log = get_logger(__name__)
        self._thread = threading.Thread(target=self._run, name="areal-rank-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Says that this rank leaves on purpose, so no one waits for its beat any longer."""
        self._stopping.set()
        self._thread.join(2 * STORE_TIMEOUT_S)

    def gone(self) -> str:
        """Names the ranks on this machine that have died; "" if none."""
        dead = [
            self._name(rank)
            for rank, (host, pid) in enumerate(self._neighbours)
            if host == socket.gethostname() and not _lives(pid)
        ]
        return ", ".join(dead)

    def _name(self, rank: int) -> str:
        host, pid = self._neighbours[rank]
        return f"rank {rank} (pid {pid} on {host})"

    def _run(self) -> None:
        beats, before = 0, time.monotonic()
        while not self._stopping.wait(BEAT_S):
            beats += 1
            moved = self._look(beats)
            now = time.monotonic()
            # After a pause of the whole machine the others get their time to beat again.
            passed = min(now - before, BEAT_S + STORE_TIMEOUT_S)
            before = now
            for rank in self._watched:
                self._silent[rank] = 0.0 if rank in moved else self._silent[rank] + passed
                if self._silent[rank] >= RANK_SILENT_S:
                    self._end(rank)
        with suppress(RuntimeError):  # the store may be gone: then so is everyone
            self._store.set(f"areal/beat/{self._rank}", _LEFT)

    def _look(self, beats: int) -> set[int]:
        """Beats, and returns the watched ranks that have beaten since the last look, or left."""
        try:
            self._store.set(f"areal/beat/{self._rank}", str(beats))
            values = self._store.multi_get([f"areal/beat/{rank}" for rank in self._watched])
        except RuntimeError:  # a beat that was never made, or the store does not answer
            return set()
        found = dict(zip(self._watched, values, strict=True))
        moved = {r for r, beat in found.items() if beat == _LEFT or beat != self._last.get(r)}
        self._last = found
        return moved

    def _end(self, rank: int) -> None:
        host, pid = self._neighbours[rank]
        self._log.error(
            "rank_silent",
            cause=f"{self._name(rank)} gave no sign of life for {self._silent[rank]:.0f} s: "
            "it is stopped or swapped out, or its machine is unreachable; ending the job",
        )
        if host == socket.gethostname():
            with suppress(psutil.Error):
                neighbour = psutil.Process(pid)
                # torchrun would wait half a minute for a stopped process to heed SIGTERM.
                if neighbour.ppid() == os.getppid():
                    neighbour.kill()
        sys.stderr.flush()
        os._exit(1)


def _connect() -> Any:
    """A connection of our own: the main thread may sit in a long wait on the default one."""
    import datetime

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=datetime.timedelta(seconds=_CONNECT_TIMEOUT_S),
    )
    store.set_timeout(datetime.timedelta(seconds=STORE_TIMEOUT_S))
    return store


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from areal.errors import StaleIncarnation, WaitTimeout
from areal.runs.checkpoints import CheckpointFolder
from areal_torch.training import checkpoint_writer
from areal_torch.training.checkpoint_writer import CheckpointWriter
from areal_torch.training.ranks import Ranks


class Actor:
    def checkpoint_bytes(self) -> int:
        return 7

    def save_checkpoint(self, directory: Path) -> Future[None]:
        (directory / "model").write_bytes(b"weights")
        written: Future[None] = Future()
        written.set_result(None)
        return written


class SlowActor(Actor):
    """Its part is written when the test says so."""

    def __init__(self) -> None:
        self.written: Future[None] = Future()

    def save_checkpoint(self, directory: Path) -> Future[None]:
        return self.written


class ThreadRanks(Ranks):
    """One of two ranks that are threads of this process."""

    def __init__(self, rank: int, meet: threading.Barrier, said: dict[int, Any]) -> None:
        super().__init__(rank, 2)
        self._meet = meet
        self._said = said

    def any_rank(self, flag: bool) -> bool:
        return any(self._exchanged(flag).values())

    def on_rank0(self, function: Callable[[], Any], shape: Any = Any) -> Any:
        return self._exchanged(function() if self.rank == 0 else None)[0]

    def _exchanged(self, mine: Any) -> dict[int, Any]:
        self._said[self.rank] = mine
        self._meet.wait(60)
        found = dict(self._said)
        self._meet.wait(60)  # no rank says the next thing before the other has read this one
        return found


class Ledger:
    """Answers a commit when it is let, or refuses it."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.committed: list[int] = []
        self.refusal: Exception | None = None

    def commit(self, step: int) -> None:
        assert self.open.wait(30)
        if self.refusal is not None:
            raise self.refusal
        self.committed.append(step)


@pytest.fixture
def made(tmp_path: Path) -> tuple[CheckpointWriter, Ledger]:
    ledger = Ledger()
    writer = CheckpointWriter(
        Ranks(0, 1), CheckpointFolder(tmp_path / "checkpoints", 2), ledger.commit
    )
    writer.actor = Actor()
    return writer, ledger


def save(writer: CheckpointWriter, step: int) -> None:
    """A whole checkpoint that the ledger has not heard of."""
    writer.snapshot(step, 1, dict)
    writer.seal()
    pending = writer._pending
    assert pending is not None
    pending.future.result(30)


def test_settle_when_the_ledger_is_slow_then_the_step_goes_on(
    made: tuple[CheckpointWriter, Ledger],
) -> None:
    writer, ledger = made
    save(writer, 1)
    writer.settle(wait=False)  # returns, though no one has answered
    assert ledger.committed == []
    ledger.open.set()
    writer.settle(wait=False)
    assert ledger.committed == [1]


def test_settle_when_asked_to_wait_then_committed(made: tuple[CheckpointWriter, Ledger]) -> None:
    writer, ledger = made
    ledger.open.set()
    writer.snapshot(1, 1, dict)
    writer.seal()
    writer.settle(wait=True)
    assert ledger.committed == [1]


def test_settle_when_the_commit_before_was_refused_then_raised(
    made: tuple[CheckpointWriter, Ledger],
) -> None:
    writer, ledger = made
    ledger.refusal = StaleIncarnation("a newer trainer has registered")
    save(writer, 1)
    writer.settle(wait=False)
    ledger.open.set()
    with pytest.raises(StaleIncarnation, match="newer trainer"):
        writer.settle(wait=False)


def test_settle_when_the_disk_is_away_then_the_deadline_is_that_of_the_bytes(
    made: tuple[CheckpointWriter, Ledger], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, _ = made
    monkeypatch.setattr(checkpoint_writer, "CHECKPOINT_LEAST_S", 0.0)
    monkeypatch.setattr(checkpoint_writer, "_SLOWEST_BYTES_PER_S", 70)
    monkeypatch.setattr(writer.actor, "save_checkpoint", lambda _: Future())
    writer.snapshot(3, 1, dict)
    pending = writer._pending
    assert pending is not None
    assert pending.patience_s == pytest.approx(0.1)  # 7 bytes
    with pytest.raises(WaitTimeout, match=r"checkpoint of step 3.*is the disk full or unmounted\?"):
        writer.settle(wait=True)


def test_patience_when_a_checkpoint_is_large_then_it_outlasts_a_collective() -> None:
    largest = checkpoint_writer._Pending(1, Path(), Future(), {}, 12 * 30 * 10**9)  # of 30B weights
    assert largest.patience_s > 5000


def test_settle_when_another_rank_still_writes_then_no_rank_settles(tmp_path: Path) -> None:
    ledger, slow, meet, said = Ledger(), SlowActor(), threading.Barrier(2), {}
    ledger.open.set()
    folder = CheckpointFolder(tmp_path / "checkpoints", 2)
    writers = [
        CheckpointWriter(ThreadRanks(rank, meet, said), folder, ledger.commit) for rank in (0, 1)
    ]
    writers[0].actor, writers[1].actor = Actor(), slow
    with ThreadPoolExecutor(2) as threads:

        def both(call: Callable[[CheckpointWriter], object]) -> None:
            list(threads.map(call, writers))

        both(lambda writer: writer.snapshot(1, 1, dict))
        writers[0].seal()
        writers[0]._pending.future.result(60)
        both(lambda writer: writer.settle(wait=False))
        assert [writer._pending is None for writer in writers] == [False, False]
        slow.written.set_result(None)
        both(lambda writer: writer.settle(wait=False))
        assert [writer._pending is None for writer in writers] == [True, True]
        writers[0]._committing.result(60)
    assert ledger.committed == [1]

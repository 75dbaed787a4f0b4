"""A training thread that stands in one call that never returns is found, and no other is."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from areal.runs.status import TrainerStatus
from areal_torch.training.stall_watch import StallWatch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class Watched:
    """A thread under a watch; looks are counted, so that a test waits for them and for no time."""

    def __init__(self, work: Callable[[], object], limit_s: float = 0.2) -> None:
        self.ended: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.looks = threading.Semaphore(0)
        self._limit_s = limit_s
        ready = threading.Event()

        def run() -> None:
            self.watch = StallWatch(self._limit, look_s=0.02, end=self.ended.put)
            ready.set()
            work()

        threading.Thread(target=run, daemon=True).start()
        assert ready.wait(60)

    def _limit(self) -> float:
        self.looks.release()
        return self._limit_s

    def spared(self) -> None:
        """Waits for more looks than a stall needs."""
        for _ in range(40):
            assert self.looks.acquire(timeout=60)
        self.watch.stop()
        assert self.ended.empty()

    def found(self) -> str:
        said = self.ended.get(timeout=60)
        self.watch.stop()
        return said


def start_without_memory() -> None:
    """What `Thread.start` does when the new thread dies before it says that it has begun."""
    thread = threading.Thread(target=print)
    thread._started.wait()  # type: ignore[attr-defined]


def twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


@pytest.mark.parametrize(
    "hang",
    [
        lambda: threading.Event().wait(),
        lambda: Future().result(),
        lambda: queue.Queue().get(),
        twice,
        start_without_memory,
    ],
    ids=["event", "future", "queue", "lock", "thread-start"],
)
def test_thread_when_its_call_never_returns_then_found_with_its_place(
    hang: Callable[[], object],
) -> None:
    said = Watched(hang).found()
    assert said.startswith("the training thread has stood in one call for ")
    assert f"{__file__}:" in said


def busy(over: threading.Event) -> None:
    while not over.is_set():
        sum(range(1000))


def polls(over: threading.Event) -> None:
    while not over.wait(0.005):
        pass


@pytest.mark.parametrize(
    "work",
    [
        busy,
        polls,
        lambda _: threading.Event().wait(3600),
        lambda _: Future().result(timeout=3600),
        lambda _: queue.Queue().get(timeout=3600),
        lambda _: subprocess.run(["sleep", "30"], check=False),
    ],
    ids=["busy", "polls", "event", "future", "queue", "process"],
)
def test_thread_when_it_runs_or_its_wait_ends_by_itself_then_spared(
    work: Callable[[threading.Event], object],
) -> None:
    over = threading.Event()
    try:
        Watched(lambda: work(over)).spared()
    finally:
        over.set()  # else it slows all later tests of this process


def test_thread_when_the_limit_grows_with_the_steps_then_it_has_that_long() -> None:
    Watched(lambda: threading.Event().wait(), limit_s=3600).spared()
    status = TrainerStatus(10, 1)
    assert status.longest_step_s == 0
    status._finished_at -= 100
    status.finished_step(1, {"step": 1})
    status.finished_step(2, {"step": 2})
    assert 100 <= status.longest_step_s < 200


def test_waits_when_the_thread_stands_for_a_while_then_its_place_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("areal_torch.training.stall_watch._SHOWN_S", 0.1)
    watched = Watched(lambda: threading.Event().wait())
    watched.found()
    [wait] = watched.watch.waits()
    assert (wait.what, wait.on) == ("progress", "the training thread")
    assert __file__ in wait.detail


STALLED = """
import threading
from areal_torch.training.stall_watch import StallWatch

StallWatch(lambda: 0.2, look_s=0.05)

def upload_weights():
    threading.Event().wait()

upload_weights()
"""


def test_process_when_its_training_thread_stands_then_it_ends_with_its_stacks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STALLED], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1
    assert "in upload_weights" in done.stderr
    assert "Thread 0x" in done.stderr
    line = json.loads(done.stderr.splitlines()[-1])
    assert (line["event"], line["level"]) == ("training_thread_stalled", "error")
    assert "in upload_weights" in line["cause"]

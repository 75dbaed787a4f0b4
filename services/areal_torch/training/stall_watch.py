"""Ends a trainer whose training thread stands in one call that never returns.

    this thread ── every LOOK_S ──> has the training thread run since the last look?
                                      yes, or its call has a deadline: all is well
                                      no, for longer than the limit: stacks to the log, exit code 1

The launcher only sees that a trainer answers, which it does from another thread. The kernel counts
how often a thread has run: one that waits for a lock that no one will release never does, unlike
one that computes, polls, or reads. A thread that could not be started, for want of memory, is such
a case: `Thread.start` waits for it without a deadline.

| state | consumes      | waits for | unblocked by         |
|-------|---------------|-----------|----------------------|
| watch | two files     | LOOK_S    | the timer, or `stop` |
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from areal.chassis.waits import Wait

LOOK_S = 5.0
LEAST_S = 600.0
"""Fewest seconds that count as a stall, whatever the steps take."""
STEPS = 10
"""A stall is also at least this many times the longest step."""
_SHOWN_S = 30.0
# Waits of these with a timeout end by themselves; one for another process has a reason.
_WAITING = ("concurrent.futures._base", "queue", "selectors", "threading")
_OTHER_PROCESS = ("multiprocessing.popen_fork", "subprocess")


class StallWatch:
    """Watches the thread that creates it, from a thread that is started once."""

    def __init__(
        self,
        limit_s: Callable[[], float],
        *,
        look_s: float = LOOK_S,
        end: Callable[[str], None] | None = None,
    ) -> None:
        """Starts to watch.

        Args:
            limit_s: How long the thread may stand in one call, in seconds; asked at each look.
            look_s: Time between two looks, in seconds.
            end: Called with what is wrong; None: ends this process.
        """
        self._thread = threading.current_thread()
        self._limit_s, self._look_s, self._end = limit_s, look_s, end or _end_process
        self._still_s = 0.0
        self._stopping = threading.Event()
        self._files = [Path(f"/proc/self/task/{self._thread.native_id}/{n}") for n in _COUNTERS]
        self._watching: threading.Thread | None = None
        if sys.platform == "linux":
            self._watching = threading.Thread(target=self._run, name="areal-stall", daemon=True)
            self._watching.start()

    def stop(self) -> None:
        """Stops the watch and its thread."""
        self._stopping.set()
        if self._watching is not None:
            self._watching.join(2 * LOOK_S)

    def waits(self) -> Iterator[Wait]:
        """Yields where the thread stands, once it has for a while; for the watchdog."""
        if self._still_s >= _SHOWN_S:
            yield Wait("progress", "the training thread", self._still_s, _place(self._frame()))

    def _run(self) -> None:
        before, last = time.monotonic(), b""
        while not self._stopping.wait(self._look_s):
            try:
                seen = b"".join(file.read_bytes() for file in self._files)
            except (OSError, MemoryError):
                seen = last
            now = time.monotonic()
            # After a pause of the whole process its thread gets its time to run again.
            passed = min(now - before, 2 * self._look_s)
            before = now
            self._still_s = self._still_s + passed if _ran(seen) == _ran(last) else 0.0
            last = seen
            if self._still_s < self._limit_s() or _ends_by_itself(self._frame()):
                continue
            self._end(
                f"the training thread has stood in one call for {self._still_s:.0f} s: "
                f"{_place(self._frame())}"
            )
            return

    def _frame(self) -> FrameType | None:
        return sys._current_frames().get(self._thread.ident or 0)


_COUNTERS = ("stat", "status")


def _ran(counters: bytes) -> tuple[bytes, ...]:
    """Returns how long a thread has run, and how often it was switched, from /proc."""
    stat, _, status = counters.rpartition(b")")[2].partition(b"\n")
    times = stat.split()[11:13]
    return (*times, *(line for line in status.splitlines() if b"ctxt_switches" in line))


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _ends_by_itself(frame: FrameType | None) -> bool:
    """Whether the innermost call has a deadline of its own, or waits for another process."""
    for each in _callers(frame):
        module = each.f_globals.get("__name__", "")
        if module in _OTHER_PROCESS:
            return True
        if module not in _WAITING:
            return False
        if isinstance(each.f_locals.get("timeout"), (int, float)):
            return True
    return False


def _place(frame: FrameType | None) -> str:
    """The innermost line of code that is not Python's own."""
    own = os.path.dirname(threading.__file__)  # noqa: PTH120 - a string, compared with others
    for each in _callers(frame):
        file = each.f_code.co_filename
        if os.path.dirname(file) != own and "concurrent" not in file:  # noqa: PTH120
            return f"{file}:{each.f_lineno} in {each.f_code.co_name}"
    return "unknown"


def _end_process(cause: str) -> None:
    # Written at once: a logger's lock may be what the thread waits for.
    faulthandler.dump_traceback(2, all_threads=True)
    line = {"event": "training_thread_stalled", "level": "error", "cause": cause}
    os.write(2, json.dumps(line).encode() + b"\n")
    os._exit(1)

"""Gives tries to a worker process, each with a deadline, and keeps what they say.

start --> ready --> try --> result --+--> next try
                     |               +--> restart, after running out of memory
                     +--> no result before the deadline, or the process ended --> restart
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tools.gpu import plan
from tools.gpu.plan import Case, Setting

ROOT = Path(__file__).resolve().parents[2]
Line = dict[str, Any]


class Driver:
    """Runs cases, and appends a line for each try to a file."""

    def __init__(self, out: Path, *, miniature: bool) -> None:
        """Starts nothing yet.

        Args:
            out: The file of lines; what the workers print is beside it, in `.log`.
            miniature: Tiny sizes.
        """
        self._out = out
        self._miniature = miniature
        self._worker: _Worker | None = None

    def run_all(self, chosen: list[str], end: float) -> Iterator[Line]:
        """Runs the chosen cases in the order of the plan; yields a line for each try.

        The time until `end`, of the monotonic clock, is shared out by the cases' limits. A case
        may use what the cases before it left, but not what belongs to those after it.
        """
        cases = [case for case in plan.CASES if case.name in chosen]
        scale = (end - time.monotonic()) / sum(case.limit_s for case in cases)
        later = sum(case.limit_s for case in cases)
        try:
            for case in cases:
                later -= case.limit_s
                if case.fresh:
                    self._stop()
                settings = list(case.settings)
                for setting in settings:
                    left_s = end - scale * later - time.monotonic()
                    line = self._run(case, setting, left_s, scale)
                    smaller = {**setting, **case.smaller}
                    if line["outcome"] == "out of memory" and smaller not in settings:
                        settings.append(smaller)
                    self._keep(line)
                    yield line
        finally:
            self._stop()

    def _run(self, case: Case, setting: Setting, left_s: float, scale: float) -> Line:
        at, started = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
        described = {"gpu": "", "torch": ""}
        if left_s <= 0:
            result: Line = {"outcome": "no time left"}
        else:
            if self._worker is None:
                self._worker = _Worker(self._out.with_suffix(".log"))
            result = self._worker.run(
                case.module, setting, left_s, scale * case.try_s, miniature=self._miniature
            )
            described = self._worker.described or described
            if not result.pop("usable", False):
                self._stop()
        return {
            "case": case.name,
            "setting": setting,
            **result,
            "seconds": round(time.monotonic() - started, 1),
            "at": at,
            **described,
            "miniature": self._miniature,
        }

    def _keep(self, line: Line) -> None:
        self._out.parent.mkdir(parents=True, exist_ok=True)
        with self._out.open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.end()
        self._worker = None


class _Worker:
    """One process of tools/gpu/worker.py."""

    def __init__(self, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        paths = [str(ROOT / "services"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        self._log = log.open("a")
        self._path = log
        # Removed here, since a try that runs out of time is killed: a checkpoint is gigabytes.
        self._scratch = tempfile.TemporaryDirectory(prefix="gpu-", ignore_cleanup_errors=True)
        self.described: dict[str, str] | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tools.gpu.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, paths)),
                "GPU_KIT_SCRATCH": self._scratch.name,
            },
            start_new_session=True,
        )
        self._said: queue.Queue[Line | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def run(
        self, module: str, setting: Setting, left_s: float, try_s: float, *, miniature: bool
    ) -> Line:
        """Returns the result of a try, which has `usable` where the worker can run another."""
        began, end = self._path.stat().st_size, time.monotonic() + left_s
        try:
            if self.described is None:
                self.described = self._next(end)
            # Imports are none of a try's time.
            end = min(end, time.monotonic() + try_s)
            order = {"module": module, "setting": setting, "miniature": miniature}
            order["limit_s"] = end - time.monotonic()
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return self._next(end)
        except queue.Empty:
            self.end()
            waited = "" if self.described else " in its imports"
            frames = _stack(self._since(began)) or ["no stack"]
            return {"outcome": "hang", "why": f"no result in time{waited}", "frames": frames}
        except (EOFError, OSError):
            self.end()
            lines = [line for line in self._since(began).splitlines() if line.strip()]
            code = self._process.returncode
            return {"outcome": "crash", "why": f"exit {code}: {lines[-1][:300] if lines else ''}"}

    def _next(self, end: float) -> Line:
        said = self._said.get(timeout=max(0.0, end - time.monotonic()))
        if said is None:
            raise EOFError
        return said

    def _since(self, position: int) -> str:
        with self._path.open("rb") as file:
            file.seek(position)
            return file.read().decode(errors="replace")

    def end(self) -> None:
        """Ends the process and those that it started; a second call does nothing."""
        if self._process.returncode is None:  # not waited for yet, so the id is still its own
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(30)
        self._reader.join(30)
        for pipe in (self._process.stdin, self._process.stdout, self._log):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # an order that it never read
                pipe.close()
        self._scratch.cleanup()


def _stack(log: str) -> list[str]:
    """The innermost frames of the main thread, which faulthandler writes last."""
    last = log.rpartition("most recent call first")[2]
    found = re.findall(r'File "(.*)", line (\d+) in (\S+)', last)[:4]
    return [f"{os.path.relpath(file, ROOT)}:{line} {name}" for file, line, name in found]

"""A peer in an interpreter of its own: a line of JSON for each case, a line for its answer."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

# Ray alone takes a minute or two to come up on a busy machine.
START_S = 600.0
ANSWER_S = 600.0


class Peer:
    """One of the files beside this one, under an interpreter that has what it measures."""

    def __init__(self, python: str, name: str, *arguments: str) -> None:
        """Starts it; `ready` waits until it has come up."""
        self._command = [python, str(Path(__file__).parent / name), *arguments]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            # A package of the peer may have a name of ours.
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        )

    def ready(self) -> Peer:
        """Waits for its first line."""
        if self._line(START_S) != "ready":
            self._fail("said something else than that it is ready")
        return self

    def tell(self, **case: Any) -> None:
        """Begins a case of the bench."""
        assert self._process.stdin is not None
        print(json.dumps(case), file=self._process.stdin, flush=True)

    def answer(self) -> Any:
        """What came of it."""
        return json.loads(self._line(ANSWER_S))

    def ask(self, **case: Any) -> Any:
        """Runs a case; gives its answer."""
        self.tell(**case)
        return self.answer()

    def close(self) -> None:
        """Ends the process and waits for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()
            self._errors.close()

    def _line(self, seconds: float) -> str:
        # One line for each question: nothing is left in the buffer when we wait on the pipe.
        assert self._process.stdout is not None
        began = time.monotonic()
        if not select.select([self._process.stdout], [], [], seconds)[0]:
            self._fail(f"did not answer within {time.monotonic() - began:.0f} s")
        line = self._process.stdout.readline().strip()
        if not line:
            self._fail("ended")
        return line

    def _fail(self, what: str) -> None:
        self._process.kill()
        self._errors.seek(0)
        tail = self._errors.read()[-2000:].decode(errors="replace")
        raise SystemExit(f"{' '.join(self._command)}: {what}\n{tail}")

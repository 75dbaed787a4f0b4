"""A peer in an interpreter of its own: a line of JSON for each case, a line for its answer."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any


class Peer:
    """One of the files beside this one, under an interpreter that has what it measures."""

    def __init__(self, python: str, name: str) -> None:
        script = Path(__file__).parent / name
        self._process = subprocess.Popen(
            [python, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        if self._answer() != "ready":
            raise SystemExit(f"{python} {script}: did not start; run it by hand to see why")

    def ask(self, **case: Any) -> Any:
        """Runs a case; gives its answer."""
        assert self._process.stdin is not None
        print(json.dumps(case), file=self._process.stdin, flush=True)
        return json.loads(self._answer())

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        finally:
            self._process.kill()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

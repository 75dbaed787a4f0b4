"""How training goes, in the trainer's log: a line every few seconds, not one per step."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from areal.chassis.logging import get_logger

INTERVAL_S = 5.0


class ProgressLog:
    """Averages the rows since the last line; the last step always has its line."""

    def __init__(
        self, total_steps: int, log: Any = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`log` and `clock` are for tests."""
        self._total = total_steps
        self._log = get_logger("areal.trainer") if log is None else log
        self._clock = clock
        self._since = clock() - INTERVAL_S  # the first step has a line
        self._rows: list[Mapping[str, Any]] = []

    def finished_step(self, row: Mapping[str, Any]) -> None:
        """Adds the row of a step; logs when it is time."""
        self._rows.append(row)
        now, step = self._clock(), int(row["step"])
        if now - self._since < INTERVAL_S and step < self._total:
            return
        shown: dict[str, Any] = {"step": f"{step}/{self._total}" if self._total else step}
        for name, key, digits in (
            ("reward", "reward_mean", 3),
            ("staleness", "staleness_mean", 2),
            ("step_seconds", "step_seconds", 2),
            ("waited_seconds", "wait_seconds", 2),
        ):
            values = [float(r[key]) for r in self._rows if r.get(key) is not None]
            if values:
                shown[name] = round(sum(values) / len(values), digits)
        self._log.info("training", **shown)
        self._since, self._rows = now, []

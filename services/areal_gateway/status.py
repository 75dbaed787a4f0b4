"""What is known of the run, once, for however many pages watch it.

    ledger ──┐                          ┌── GET /v1/status   (last state)
    servers ─┤ put / fail      status   ├── GET /v1/steps    (rows)
    versions ┼────────────> RunStatus ──┤
    trainer ─┤  add_rows       rows     └── subscribe()  ──> one event stream per page
    clock ───┘  tick

A subscriber holds two marks (last sequence, last step) and no queue: when it wakes it gets the
newest state and the rows it has not had. A slow one thus skips states, and costs no memory.

| who           | consumes         | waits for          | unblocked by                    |
|---------------|------------------|--------------------|---------------------------------|
| subscribe()   | states, rows     | the next change    | tick() every second, add_rows() |
| put/fail/tick | upstream answers | nothing            | -                               |
"""

from __future__ import annotations

import asyncio
import bisect
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from areal.chassis.waits import Wait
from areal.config.learning_rules import Finding, of_run
from areal.runs.step_rows import thin

SOURCES = ("ledger", "servers", "trainer")
_VALUES = (*SOURCES, "versions")
# Throughput is averaged over this many seconds.
_RATE_WINDOW_S = 15.0
# The time left is reckoned from this many last steps.
_ETA_STEPS = 20


class RunStatus:
    """The state of a run as plain JSON types."""

    def __init__(
        self,
        run: Mapping[str, Any],
        *,
        history: int,
        max_rows: int,
        configured: Sequence[str] = SOURCES,
        expected: Sequence[Finding] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Starts with nothing known.

        Args:
            run: Constant facts of the run, shown as they are.
            history: Samples kept.
            max_rows: Step rows kept; of more, those in the middle are thinned.
            configured: Sources that have an address.
            expected: What the configuration says against learning.
            clock: Unix seconds.
        """
        self._run = run
        self._clock = clock
        self._values: dict[str, Any] = dict.fromkeys(_VALUES)
        now = clock()
        self._health: dict[str, dict[str, Any]] = {
            name: {"configured": name in configured, "ok": False, "error": "", "since": now}
            for name in SOURCES
        }
        self._rows: list[dict[str, Any]] = []
        self._max_rows = max_rows
        self._expected = expected
        self._findings = of_run(expected, [])
        self._samples: deque[dict[str, Any]] = deque(maxlen=history)
        self._generation = 0
        self._sequence = 0
        self._encoded: bytes | None = None
        self._changed = asyncio.Event()
        self._closed = False

    # -- writing

    def put(self, source: str, value: Any) -> None:
        """Records a source's answer."""
        self._values[source] = value
        if source in self._health:
            self._set_health(source, ok=True, error="")

    def fail(self, source: str, error: str) -> None:
        """Records that a source did not answer: its last value stays, marked as old."""
        self._set_health(source, ok=False, error=error)

    def add_rows(self, rows: Sequence[dict[str, Any]]) -> None:
        """Adds the trainer's step rows; a known step replaces its row and all later ones.

        That is what happens when a trainer resumes from a checkpoint and trains steps again.
        """
        for row in rows:
            at = bisect.bisect_left(self._rows, row["step"], key=_step)
            if at < len(self._rows):
                del self._rows[at:]
                self._generation += 1
            self._rows.append(row)
            thin(self._rows, self._max_rows)
        if rows:
            self._rows_changed()

    def rewind(self, step: int) -> None:
        """Drops the rows after `step`, from which a trainer has resumed."""
        at = bisect.bisect_right(self._rows, step, key=_step)
        if at < len(self._rows):
            del self._rows[at:]
            self._generation += 1
            self._rows_changed()

    def tick(self) -> None:
        """Takes the sample of this second and lets subscribers see the newest state."""
        sample = self._sample()
        if sample is not None:
            self._samples.append(sample)
        self._sequence += 1
        self._wake()

    def close(self) -> None:
        """Ends the subscriptions of all pages."""
        self._closed = True
        self._wake()

    # -- reading

    def status(self) -> dict[str, Any]:
        """Returns everything a live view needs; see the service's README for the fields."""
        trainer = self._values["trainer"]
        last = self._rows[-1] if self._rows else None
        recent = self._samples[-1] if self._samples else {}
        return {
            "time": self._clock(),
            "run": self._run,
            "sources": self._health,
            "ledger": self._values["ledger"],
            "servers": self._values["servers"],
            "versions": self._values["versions"],
            "trainer": trainer,
            "last_step": last,
            "findings": [finding.as_dict() for finding in self._findings],
            "rates": {
                "samples_per_s": recent.get("samples_per_s"),
                "tokens_per_s": recent.get("tokens_per_s"),
            },
            "sample": recent or None,
            "eta_s": self._eta(trainer),
        }

    def status_json(self) -> bytes:
        """Returns `status()` encoded, once for all subscribers."""
        if self._encoded is None:
            self._encoded = orjson.dumps(self.status())
        return self._encoded

    def rows_after(self, step: int) -> list[dict[str, Any]]:
        """Returns the step rows above `step`, oldest first."""
        return self._rows[bisect.bisect_right(self._rows, step, key=_step) :]

    def waits(self) -> Iterator[Wait]:
        """Sources that do not answer, for the watchdog."""
        for name, health in self._health.items():
            if health["configured"] and not health["ok"]:
                since = max(0.0, self._clock() - health["since"])
                yield Wait("answer", name, since, health["error"])

    @property
    def last_step(self) -> int:
        """Returns the step of the newest row; 0 if there is none."""
        return int(self._rows[-1]["step"]) if self._rows else 0

    async def subscribe(self, after_step: int = 0) -> AsyncGenerator[tuple[str, bytes], None]:
        """Yields (event name, JSON) for one page, until `close`.

        First `history` (samples), then `steps` and `status` whenever there is something new.
        `steps` is {reset, rows}: rows after `after_step`; reset (always so in the first) means
        that rows sent before no longer hold.
        """
        yield "history", orjson.dumps(list(self._samples))
        generation, step, sequence, reset = self._generation, after_step, -1, True
        while not self._closed:
            changed = self._changed
            if generation != self._generation:
                generation, step, reset = self._generation, 0, True
            rows = self.rows_after(step)
            if rows or reset:
                step = rows[-1]["step"] if rows else step
                body = orjson.dumps({"reset": reset, "rows": rows})
                reset = False
                yield "steps", body
            if sequence != self._sequence:
                sequence = self._sequence
                yield "status", self.status_json()
            if changed is self._changed:  # nothing came while this page was being written to
                await changed.wait()

    # -- inside

    def _rows_changed(self) -> None:
        self._findings = of_run(self._expected, self._rows)
        self._wake()

    def _wake(self) -> None:
        self._encoded = None
        self._changed.set()
        self._changed = asyncio.Event()

    def _set_health(self, source: str, *, ok: bool, error: str) -> None:
        health = self._health[source]
        if health["ok"] != ok:
            health["since"] = self._clock()
        health["ok"], health["error"] = ok, error

    def _sample(self) -> dict[str, Any] | None:
        ledger = self._values["ledger"]
        if ledger is None or not self._health["ledger"]["ok"]:
            return None
        now = self._clock()
        sample: dict[str, Any] = {
            "time": now,
            **{state: ledger["counts"][state] for state in _LIVE},
            "trajectories": ledger["trajectories"],
            "tokens": ledger["generated_tokens"],
            "samples_per_s": None,
            "tokens_per_s": None,
        }
        for old in self._samples:
            elapsed = now - old["time"]
            if elapsed > _RATE_WINDOW_S:
                continue
            # A counter that fell belongs to another trial.
            if elapsed > 0 and sample["trajectories"] >= old["trajectories"]:
                sample["samples_per_s"] = (sample["trajectories"] - old["trajectories"]) / elapsed
                sample["tokens_per_s"] = (sample["tokens"] - old["tokens"]) / elapsed
            break
        return sample

    def _eta(self, trainer: dict[str, Any] | None) -> float | None:
        if not trainer or trainer["state"] in {"finished", "failed"}:
            return None
        seconds = [
            row["time/step"]
            for row in self._rows[-_ETA_STEPS:]
            if isinstance(row.get("time/step"), int | float)
        ]
        left = trainer["total_steps"] - trainer["step"]
        if not seconds or left < 0:
            return None
        return float(left * sum(seconds) / len(seconds))


_LIVE = ("queued", "running", "completed", "batched")


def _step(row: dict[str, Any]) -> int:
    return int(row["step"])

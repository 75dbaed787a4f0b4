"""The files that a trainer writes into the run folder (by rank 0).

metrics.jsonl   one row per finished step
batches.jsonl   which tasks each step was given, by incarnation; only ever appended to
trainer.json    free-form results: name -> value (held-out accuracy, …)
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from areal.chassis.files import replacing
from areal.config.learning_rules import Finding, of_rows
from areal.runs.metric_names import named
from areal.runs.status import Evaluation
from areal.runs.step_rows import thin

MEASURED_AT = "measured_at_step"
"""The result that says, for each evaluation by name, which step's policy it measured."""

EVALUATIONS = "evaluations"
"""The result that lists every evaluation of the run: name, step, and its figure."""


def best_step(evaluations: Sequence[dict[str, Any]], steps: Sequence[int]) -> int | None:
    """Returns the step with the highest held-out reward, the later of equals; None: unknown.

    Rewards on different rows are not compared: of several names, the one that was evaluated most
    often decides, the first of equals.
    """
    found = _best(evaluations, steps)
    return None if found is None else int(found["step"])


def describe_best(evaluations: Sequence[dict[str, Any]], steps: Sequence[int]) -> str:
    """Returns the evaluation that `best_step` goes by, and that of the start; "" if none is known.

    Example: `heldout 0.045 (0.159 before training)`.
    """
    found = _best(evaluations, steps)
    if found is None:
        return ""
    name = found["name"]
    start = [e for e in evaluations if e["name"] == name and e["step"] == 0]
    before = f" ({float(start[0]['mean']):.4g} before training)" if start else ""
    return f"{name} {float(found['mean']):.4g}{before}"


def _best(evaluations: Sequence[dict[str, Any]], steps: Sequence[int]) -> dict[str, Any] | None:
    counts = Counter(str(e["name"]) for e in evaluations)
    known = [e for e in evaluations if e["step"] in steps]
    if not known:
        return None
    by = max((str(e["name"]) for e in known), key=counts.__getitem__)
    return max(
        (e for e in known if e["name"] == by), key=lambda e: (float(e["mean"]), int(e["step"]))
    )


def over_rows(evaluation: Mapping[str, Any]) -> str:
    """Returns the rows that a mean is over: `over 12 rows`, or `over 9 of 12 rows` if 3 failed.

    Args:
        evaluation: An entry of `EVALUATIONS`; "" if it has no number of rows.
    """
    rows, failed = int(evaluation.get("rows") or 0), int(evaluation.get("failed") or 0)
    if not rows:
        return ""
    return f"over {rows:,} of {rows + failed:,} rows" if failed else f"over {rows:,} rows"


def last_evaluations(results: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the last entry of `EVALUATIONS` for each name, from the content of trainer.json."""
    return {str(each["name"]): each for each in results.get(EVALUATIONS) or ()}


class RunFiles:
    """The files of one run."""

    def __init__(self, run_dir: Path, resume_step: int) -> None:
        """Opens the files; rows above `resume_step` belong to lost steps and are dropped.

        Rows of an earlier release get the names of this one.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        self._metrics = run_dir / "metrics.jsonl"
        self._batches = run_dir / "batches.jsonl"
        self._results = run_dir / "trainer.json"
        self.rows = [row for row in self._read_rows() if row["step"] <= resume_step]
        write_atomically(self._metrics, b"".join(orjson.dumps(row) + b"\n" for row in self.rows))
        # Open until `close`: a trainer that was replaced while it was stopped still appends to the
        # file that its successor has replaced, not to the successor's.
        self._appending = os.open(self._metrics, os.O_WRONLY | os.O_APPEND)
        thin(self.rows)
        self.results: dict[str, Any] = (
            json.loads(self._results.read_text("utf-8")) if self._results.exists() else {}
        )

        self._found: set[str] = set()
        _end_last_line(self._batches)

    def _read_rows(self) -> list[dict[str, Any]]:
        if not self._metrics.exists():
            return []
        rows = []
        for line in self._metrics.read_bytes().splitlines():
            try:
                rows.append(named(orjson.loads(line)))
            except orjson.JSONDecodeError:  # cut off by a crash while it was written
                break
        return rows

    def evaluations(self) -> list[Evaluation]:
        """Returns the last evaluation of each name, in the order of their steps."""
        steps, entries = self.results.get(MEASURED_AT) or {}, last_evaluations(self.results)
        known = []
        for name, step in steps.items():
            of = entries.get(name, {})
            counts = int(of.get("rows", 0)), int(of.get("failed", 0))
            known.append(Evaluation(name, int(step), float(self.results[name]), *counts))
        return sorted(known, key=lambda evaluation: evaluation.step)

    def append_row(self, row: dict[str, Any]) -> None:
        """Adds the row of a finished step."""
        self.rows.append(row)
        thin(self.rows)
        os.write(self._appending, orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")

    def new_findings(self) -> list[Finding]:
        """Returns what the rows say against learning, each rule once."""
        new = [each for each in of_rows(self.rows) if each.rule not in self._found]
        self._found |= {each.rule for each in new}
        return new

    def close(self) -> None:
        """Closes the rows' file."""
        os.close(self._appending)

    def append_batch(
        self, *, step: int, incarnation: int, replay: bool, task_ids: Sequence[str]
    ) -> None:
        """Records which tasks a step got, before it trains on them.

        Rows of lost steps stay, because a repeated step must get the same tasks.
        """
        row = {"step": step, "incarnation": incarnation, "replay": replay, "task_ids": task_ids}
        with self._batches.open("ab") as file:
            file.write(orjson.dumps(row) + b"\n")

    def record(self, name: str, value: Any) -> None:
        """Sets one result of the run."""
        self.results[name] = value
        write_atomically(self._results, json.dumps(self.results, indent=2).encode())


def _end_last_line(path: Path) -> None:
    """A line that a crash cut off must not spoil the next one."""
    if path.exists() and not path.read_bytes().endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")


def write_atomically(path: Path, content: bytes) -> None:
    """Writes beside the target, flushes to disk, renames: readers see all or nothing."""
    with replacing(path) as temporary, temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())

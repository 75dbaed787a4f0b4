"""Rows of metrics.jsonl, one per train step: read, averaged, smoothed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal.config.learning_rules import WINDOW
from areal.runs.metric_names import named

Row = dict[str, Any]


def read_rows(file: Path) -> list[Row]:
    """Returns the rows by step; for a repeated step, the last row.

    Those of an earlier release have the names of this one. A line cut off by a crash is left out.
    """
    rows: dict[int, Row] = {}
    if file.is_file():
        for line in file.read_text("utf-8").split("\n"):
            try:
                row = named(json.loads(line))
                rows[int(row["step"])] = row
            except (ValueError, KeyError, TypeError):
                continue
    return [rows[step] for step in sorted(rows)]


def column(rows: Sequence[Row], key: str) -> list[float]:
    """Returns the values of one key; rows without it, or with null for NaN, are skipped."""
    return [float(row[key]) for row in rows if row.get(key) is not None]


def recent_mean(rows: Sequence[Row], key: str) -> float:
    """Returns the mean over the last `WINDOW` rows; 0 if there are none."""
    return mean(column(rows[-WINDOW:], key)) or 0.0


def mean(values: Sequence[float]) -> float | None:
    """Returns the arithmetic mean; None for no values."""
    return sum(values) / len(values) if values else None


def moving_mean(values: Sequence[float], window: int = WINDOW) -> list[float]:
    """Returns the mean of the last `window` values at each point (of fewer at the start)."""
    return [mean(values[max(0, end - window) : end]) or 0.0 for end in range(1, len(values) + 1)]

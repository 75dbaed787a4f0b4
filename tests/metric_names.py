"""Whether a run's rows have only metrics that docs/metrics.md explains."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from areal.runs.metric_names import METRICS


def known() -> re.Pattern[str]:
    """Matches the names of the table from which the page is generated."""
    names = [re.escape(metric.name) for section in METRICS.values() for metric in section]
    return re.compile("|".join(names).replace("NAME", r"[\w.-]+"))


def undocumented(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """Keys of metrics.jsonl, or of a tracker, that the table does not have."""
    pattern = known()
    return {key for row in rows for key in row if not pattern.fullmatch(key)}


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """A run's metrics.jsonl; fails on a key that is neither explained nor `my/…`."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert not {key for key in undocumented(rows) if not key.startswith("my/")}
    return rows

"""The metrics that docs/metrics.md explains."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"


def documented() -> set[str]:
    """Names in the first column of the page's tables."""
    lines = re.findall(r"^\| (`.*?) \|", PAGE.read_text(), re.MULTILINE)
    return {name for line in lines for name in re.findall(r"`([^`]+)`", line)}


def undocumented(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """Keys of metrics.jsonl that the page does not have."""
    return {key for row in rows for key in row} - documented()

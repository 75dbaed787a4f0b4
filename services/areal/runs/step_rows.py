"""Rows of train steps in bounded memory, for those who show a run that may be long."""

from __future__ import annotations

from typing import Any

MOST_ROWS = 2_000
"""Most rows that are kept; a row has about 4 kB, and metrics.jsonl has all of them."""


def thin(rows: list[dict[str, Any]], most: int = MOST_ROWS) -> None:
    """Drops every other row of the middle once there are more than `most`, in place.

    The first and the last quarter stay whole: signs against learning compare a run's last steps
    with its first. Rows of long ago are thinned again and again, so a curve keeps its shape.

    Args:
        rows: Oldest first.
        most: How many rows may stay.
    """
    ends = most // 4
    while len(rows) > most:
        del rows[ends : len(rows) - ends : 2]

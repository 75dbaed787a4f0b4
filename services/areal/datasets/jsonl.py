"""Rows from a .jsonl file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from areal.errors import InvalidInput


def load_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Returns the rows of a JSON Lines file (one JSON object per line), in order.

    Args:
        path: The file. All of it is read into memory. Blank lines are skipped.

    Raises:
        InvalidInput: The file cannot be read or has no rows, or a line is not a JSON object. For
            such a line, the message begins with `FILE:LINE:`.
    """
    rows: list[dict[str, Any]] = []
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                try:
                    row = orjson.loads(line)
                except orjson.JSONDecodeError as error:
                    reason = f"{error.msg}, column {error.colno}"
                    raise InvalidInput(f"{path}:{number}: not JSON ({reason})") from None
                if not isinstance(row, dict):
                    raise InvalidInput(
                        f"{path}:{number}: expected a JSON object, got {type(row).__name__}"
                    )
                rows.append(row)
    except OSError as error:
        raise InvalidInput(f"dataset {str(path)!r}: cannot be read: {error.strerror}") from None
    if not rows:
        raise InvalidInput(f"dataset {str(path)!r}: has no rows")
    return rows

"""Rows from a .jsonl file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from areal.errors import InvalidInput


def load_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Reads one JSON object per line; blank lines are skipped.

    Returns:
        The rows in file order, all in memory.

    Raises:
        InvalidInput: The file cannot be read or has no rows, or a line is not a JSON object: the
            message begins `file:LINE:`.
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

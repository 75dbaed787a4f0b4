"""Rows from a .jsonl file, or from a .json file with one array of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from areal.datasets._formats import READ, is_utf8, seems
from areal.errors import InvalidInput
from areal.tokenizer.json_text import loads


def load_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """Returns the rows of a JSON Lines file (one JSON object per line), in order.

    Integers stay integers, whatever their size. A file with the suffix .json may also contain one
    array of objects.

    Args:
        path: The file, in UTF-8. All of it is read into memory. Blank lines are skipped.

    Raises:
        InvalidInput: The file cannot be read, has another format or no rows, a .json file is one
            object around its rows, or a line is not a JSON object. For such a line, the message
            begins with `FILE:LINE:`.
    """
    place = Path(path)
    try:
        content = place.read_bytes()
    except OSError as error:
        raise InvalidInput(f"dataset {str(path)!r}: cannot be read: {error.strerror}") from None
    if kind := seems(place.name, content):
        raise InvalidInput(f"dataset {str(path)!r}: seems to be {kind}: {READ}")
    begins = content.lstrip()[:1] if place.suffix == ".json" else b""
    if begins == b"{":
        _refuse_columns(path, content)
    if begins == b"[":
        rows = list(_objects(_array(path, content), f"{path}: row "))
    else:
        rows = list(_objects(_lines(path, content), f"{path}:"))
    if not rows:
        raise InvalidInput(f"dataset {str(path)!r}: has no rows")
    return rows


def _lines(path: str | Path, content: bytes) -> Iterator[tuple[int, Any]]:
    # Split bytes: `str.splitlines` would also split at the line separators inside texts.
    for number, line in enumerate(content.split(b"\n"), start=1):
        if line.strip():
            yield number, _value(line, f"{path}:{number}")


def _array(path: str | Path, content: bytes) -> Iterator[tuple[int, Any]]:
    return enumerate(_value(content, str(path)), start=1)


def _value(content: bytes, where: str) -> Any:
    try:
        return loads(content)
    except ValueError as error:
        if not is_utf8(content):
            raise InvalidInput(
                f"{where}: seems to be text in another encoding than UTF-8: {READ}"
            ) from None
        raise InvalidInput(f"{where}: not JSON ({error})") from None


def _refuse_columns(path: str | Path, content: bytes) -> None:
    """Raises an error if a .json file is one object around the rows, or one of columns."""
    try:
        value = loads(content)  # of one object per line, it reads the first one only
    except ValueError:
        return
    if not isinstance(value, dict) or not value:
        return
    if all(map(_is_column, value.values())) and not any(map(_is_chat, value.values())):
        names = ", ".join(map(repr, list(value)[:3])) + (", …" if len(value) > 3 else "")
        raise InvalidInput(
            f"dataset {str(path)!r}: one object with lists or columns ({names}): expected a list "
            "of rows, or one JSON object per line"
        )


def _is_column(value: Any) -> bool:
    """Whether it may have a value for each row: a list, or pandas' object of numbered values."""
    return isinstance(value, list) or (isinstance(value, dict) and "0" in value)


def _is_chat(value: Any) -> bool:
    """Whether it is a list of messages, as one row has."""
    return (
        bool(value)
        and isinstance(value, list)
        and all(isinstance(each, dict) and "role" in each for each in value)
    )


def _objects(values: Iterable[tuple[int, Any]], where: str) -> Iterator[dict[str, Any]]:
    for number, value in values:
        if not isinstance(value, dict):
            raise InvalidInput(
                f"{where}{number}: expected a JSON object, got {type(value).__name__}"
            )
        yield value

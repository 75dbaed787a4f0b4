"""Keeps rows out of training, so that no evaluation asks what was trained on.

| address                               | training rows     | held-out rows                      |
|---------------------------------------|-------------------|------------------------------------|
| folder or dataset with a split `test` | the split `train` | the first rows of the split `test` |
| any other                             | the rest          | those with the smallest hashes     |

The hash is of what a row asks, without its answer. It depends on nothing else: shuffling a file, or
adding rows to it, moves almost no row to the other part, and rows that ask the same share a part.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from areal.datasets.rows import NoSplitError, load_rows
from areal.errors import InvalidInput

Rows = list[dict[str, Any]]

# What a row asks, in the forms of common datasets. Its other fields are answers or remarks.
_QUESTIONS = ("prompt", "question", "problem", "instruction", "input", "context", "images")
# A chat: what it asks comes before the assistant's last turn.
_CHATS = ("messages", "conversations", "chosen")


def train_and_heldout(
    address: str | Path, heldout_rows: int, *, name: str = "heldout_rows"
) -> tuple[Rows, Rows]:
    """Returns the training rows and the held-out rows of a file, a folder, or a dataset on the Hub.

    Held-out rows are the first rows of the split `test`. A single file and a dataset without that
    split have them held out by `hold_out`. A training row that asks the same as a held-out one is
    left out; a warning says how many there are.

    Args:
        address: As for `load_rows`.
        heldout_rows: Number of held-out rows; 0: none, all rows are for training.
        name: The key that set `heldout_rows`, for error messages.

    Returns:
        (training rows, held-out rows).

    Raises:
        InvalidInput: As `load_rows` and `hold_out`, or the split `test` has fewer rows.

    Example:
        >>> train, heldout = train_and_heldout("hf://openai/gsm8k/main", 200)
        >>> len(train), len(heldout)
        (7473, 200)
    """
    train = load_rows(address, "train")
    if heldout_rows == 0:
        return train, []
    try:
        # A file alone is no split, whatever its name is.
        test = [] if Path(address).is_file() else load_rows(address, "test")
    except NoSplitError:
        test = []
    if not test:
        return hold_out(train, heldout_rows, name=name)
    if not 0 <= heldout_rows <= len(test):
        raise InvalidInput(
            f"{name}={heldout_rows}: split 'test' of {address} has {len(test)} rows: expected 0 to "
            f"{len(test)}"
        )
    heldout = test[:heldout_rows]
    asked = {_asked(row) for row in heldout}
    others = [row for row in train if _asked(row) not in asked]
    if not others:
        raise InvalidInput(f"dataset {address}: the splits 'train' and 'test' ask the same")
    if len(others) < len(train):
        logging.getLogger(__name__).warning(
            "dataset %s: %d of %d training rows are left out, because held-out rows ask the same",
            address,
            len(train) - len(others),
            len(train),
        )
    return others, heldout


def hold_out(
    rows: Sequence[dict[str, Any]], count: int, *, name: str = "heldout_rows"
) -> tuple[Rows, Rows]:
    """Returns the training rows and the held-out rows of one set of rows.

    A row's part depends only on a hash of what it asks: its fields `prompt`, `question`,
    `problem`, `instruction`, `input`, `context` and `images`, and its chat up to the assistant's
    last turn; or the whole row if it has none of these. Rows that ask the same share a part.

    Args:
        rows: All rows.
        count: Number of rows to hold out; 0: none. There are fewer if the rows that ask the same
            do not add up to it.
        name: The key that set `count`, for error messages.

    Returns:
        (training rows in the order of `rows`, held-out rows in the order of their hashes).

    Raises:
        InvalidInput: `count` is negative, or does not leave a training row, or each question has
            more rows than that.
    """
    if count < 0:
        raise InvalidInput(f"{name}={count}: expected 0 or more")
    if count >= len(rows) > 0:
        raise InvalidInput(
            f"{name}={count}: there are {len(rows)} rows: expected fewer than {len(rows)}, because "
            "held-out rows are not trained on"
        )
    same: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        same.setdefault(_asked(row), []).append(index)
    chosen: list[int] = []
    for asked in sorted(same):
        if len(chosen) + len(same[asked]) <= count:
            chosen += same[asked]
    if count and not chosen:
        least = min(map(len, same.values()), default=0)
        raise InvalidInput(
            f"{name}={count}: the {len(rows)} rows ask {len(same)} different questions, each in "
            f"{least} rows or more: expected at least {least}"
        )
    held = set(chosen)
    return [row for index, row in enumerate(rows) if index not in held], [rows[i] for i in chosen]


def _asked(row: dict[str, Any]) -> str:
    """The hash of what a row asks."""
    asked = {key: row[key] for key in _QUESTIONS if key in row}
    for key in _CHATS:
        # Beside a prompt, `chosen` is an answer only.
        if isinstance(row.get(key), list) and not (key == "chosen" and asked):
            asked[key] = _before_the_answer(row[key])
    text = json.dumps(asked or row, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()


def _before_the_answer(chat: list[Any]) -> list[Any]:
    """The messages before the assistant's last turn; a chat that does not end in one is whole."""
    end = len(chat)
    while end and _speaker(chat[end - 1]) in ("assistant", "gpt"):
        end -= 1
    return chat[:end]


def _speaker(message: Any) -> Any:
    return message.get("role", message.get("from")) if isinstance(message, dict) else None

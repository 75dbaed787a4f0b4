"""Keeps a judge's scores and usage, in one SQLite file or in memory.

With a file, all processes that open it share the answers and the budget, and both outlive them.
The file holds hashes and numbers, no text.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from pathlib import Path

from areal.errors import CannotStart, CapacityExceeded

_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (place INTEGER PRIMARY KEY, key TEXT UNIQUE, score REAL);
CREATE TABLE IF NOT EXISTS used (judge TEXT PRIMARY KEY, calls INTEGER, tokens INTEGER);
"""
# Another process holds the file for milliseconds; a full or broken disk takes longer.
_PATIENCE_S = 5.0


@dataclass(frozen=True)
class Used:
    """What a judge's requests have cost so far."""

    calls: int = 0
    tokens: int = 0


class JudgeBook:
    """Keeps scores by key, deletes the oldest first, and counts what each judge has used."""

    def __init__(self, path: str | Path | None, max_answers: int) -> None:
        """Opens or creates the file.

        Args:
            path: The file; None: memory, for this process alone.
            max_answers: Maximum number of scores kept.

        Raises:
            CannotStart: The file cannot be opened, or has another format.
        """
        self._max_answers = max_answers
        try:
            self._file = sqlite3.connect(
                path or ":memory:", timeout=_PATIENCE_S, isolation_level=None
            )
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise CannotStart(f"judge cache {str(path)!r}: {error}") from None

    def find(self, key: str) -> float | None:
        """Returns the score kept under a key."""
        row = self._file.execute("SELECT score FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else float(row[0])

    def keep(self, key: str, score: float) -> None:
        """Keeps a score and forgets what is too old."""
        self._file.execute(
            "INSERT OR REPLACE INTO answers (key, score) VALUES (?, ?)", (key, score)
        )
        self._file.execute(
            "DELETE FROM answers WHERE place <= (SELECT MAX(place) FROM answers) - ?",
            (self._max_answers,),
        )

    def spend(self, judge: str, max_calls: int | None, max_tokens: int | None) -> None:
        """Counts one request, if the budget has room for it.

        Raises:
            CapacityExceeded: The budget is spent.
        """
        self._file.execute("INSERT OR IGNORE INTO used VALUES (?, 0, 0)", (judge,))
        counted = self._file.execute(
            "UPDATE used SET calls = calls + 1 WHERE judge = ?"
            " AND (? IS NULL OR calls < ?) AND (? IS NULL OR tokens < ?)",
            (judge, max_calls, max_calls, max_tokens, max_tokens),
        ).rowcount
        if not counted:
            used = self.used(judge)
            raise CapacityExceeded(
                f"judge {judge}: its budget is spent: {used.calls} calls (max_calls: "
                f"{max_calls or 'no limit'}), {used.tokens} tokens (max_tokens: "
                f"{max_tokens or 'no limit'})"
            )

    def add_tokens(self, judge: str, tokens: int) -> None:
        """Counts what an answer has cost."""
        self._file.execute("UPDATE used SET tokens = tokens + ? WHERE judge = ?", (tokens, judge))

    def used(self, judge: str) -> Used:
        """Returns what a judge's requests have cost so far."""
        row = self._file.execute(
            "SELECT calls, tokens FROM used WHERE judge = ?", (judge,)
        ).fetchone()
        return Used(*row) if row else Used()

    def close(self) -> None:
        """Closes the database file."""
        self._file.close()

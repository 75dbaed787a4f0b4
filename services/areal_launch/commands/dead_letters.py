"""`areal dead-letters`: lists tasks that failed permanently and why, retries or drops them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from areal.clients.buffer.admin import BufferAdmin
from areal.clients.buffer.connection import BufferConnection
from areal.config.experiment import load_service_config
from areal.errors import InvalidInput, NotFound
from areal.protocol.leases import DeadLetter
from areal.security import Security, SecurityConfig
from areal_launch.run_folder import RunFolder, find_run
from areal_launch.view.output import print_event, say

T = TypeVar("T")

# Last lines of a traceback in the printed list; --json has the whole traceback.
_TRACEBACK_LINES = 12
_MOST = 1_000_000
# The most dead letters to keep in the folder of a run that has ended.
_KEPT = 200


def describe(row: Mapping[str, Any], now: float) -> str:
    """Returns a dead letter (see `as_row`) as text: heading, cause, traceback."""
    attempts = row["attempts"] + row["infrastructure_attempts"]
    ago = f", {_age(now - row['end_time'])} ago" if row["end_time"] is not None else ""
    lines = [f"{row['task_id']}   {row['cause']}, {attempts} attempts{ago}"]
    lines += [f"    {line}" for line in row["reason"].splitlines()]
    trace = row["traceback"].rstrip().splitlines()
    if len(trace) > _TRACEBACK_LINES:
        lines.append(f"      … {len(trace) - _TRACEBACK_LINES} earlier lines; --json has them")
    lines += [f"      {line}" for line in trace[-_TRACEBACK_LINES:]]
    return "\n".join(lines)


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def list_dead_letters(run: Path | None, limit: int, *, as_json: bool, endpoint: str = "") -> int:
    """Prints dead letters, newest first; for a run that has ended, those in its folder.

    Raises:
        NotFound: The run was killed, so that its dead letters are not in its folder.
    """
    if not 1 <= limit <= _MOST:
        raise InvalidInput(f"--limit {limit}: expected 1 to {_MOST:,}")
    folder = None if endpoint else find_run(run, live=False)
    if folder is not None and _buffer_ended(folder):
        rows = _kept_rows(folder)[:limit]
        if rows and not as_json:
            say(f"{folder.path} has ended; its dead letters were:\n")
    else:
        here = None if folder is None else folder.path
        letters = _ask(here, endpoint, lambda admin: admin.list_dead_letters(limit))
        rows = [as_row(each) for each in letters]
    if as_json:
        for row in rows:
            say(json.dumps(row, separators=(",", ":")))
        return 0
    now = time.time()
    say("\n\n".join(describe(row, now) for row in rows) or "no dead letters")
    return 0


def _buffer_ended(folder: RunFolder) -> bool:
    """Whether the ledger ended with the run; one that others run may still be there."""
    own = "buffer" in folder.read_stack().get("processes", {})
    return not folder.held() and (own or folder.dead_letters_file.is_file())


def _kept_rows(folder: RunFolder) -> list[dict[str, Any]]:
    """Returns what `keep_dead_letters` wrote: nothing if there were none."""
    if folder.dead_letters_file.is_file():
        return [json.loads(line) for line in folder.dead_letters_file.read_bytes().splitlines()]
    if folder.read_stack().get("state") not in ("stopped", "failed"):
        raise NotFound(
            f"{folder.path}: was killed before it wrote its dead letters; run it again to see them"
        )
    return []


async def keep_dead_letters(folder: RunFolder, buffer: str, security: Security) -> None:
    """Writes the newest dead letters into the run folder, to be read without a stack.

    Raises:
        ArealError: The ledger does not answer.
    """
    connection = BufferConnection(buffer, security, timeout_s=5.0)
    try:
        letters = await BufferAdmin(connection).list_dead_letters(_KEPT)
    finally:
        await connection.close()
    rows = "".join(f"{json.dumps(as_row(letter))}\n" for letter in letters)
    folder.dead_letters_file.write_text(rows, "utf-8")


def as_row(letter: DeadLetter) -> dict[str, Any]:
    """Returns what --json prints, and what is kept when a run ends."""
    record = letter.record
    return {
        "task_id": record.task.task_id,
        "purpose": record.task.purpose.value,
        "cause": letter.cause,
        "reason": record.reason,
        "attempts": record.attempts,
        "infrastructure_attempts": record.infrastructure_attempts,
        "end_time": record.end_time,
        "data": record.task.data,
        "traceback": letter.traceback,
    }


def retry_dead_letters(
    run: Path | None, task_ids: list[str], *, as_json: bool, endpoint: str = ""
) -> int:
    """Queues dead letters again: the named ones or, if none is named, all."""
    done = _ask(run, endpoint, lambda admin: admin.retry_dead_letters(task_ids))
    return _report("retried", "queued again", done, task_ids, as_json=as_json)


def drop_dead_letters(
    run: Path | None,
    task_ids: list[str],
    *,
    everything: bool,
    as_json: bool,
    endpoint: str = "",
) -> int:
    """Removes dead letters from the list."""
    if bool(task_ids) == everything:
        raise InvalidInput("dead-letters drop: expected task ids, or --all")
    done = _ask(run, endpoint, lambda admin: admin.drop_dead_letters(task_ids))
    return _report("dropped", "dropped", done, task_ids, as_json=as_json)


def _report(event: str, words: str, done: int, task_ids: list[str], *, as_json: bool) -> int:
    """Prints the result; returns exit code 1 if a named task is not on the list."""
    missing = max(0, len(set(task_ids)) - done)
    if as_json:
        print_event(event, tasks=done, not_on_the_list=missing)
    else:
        rest = f"; {missing} of the given ids are not dead letters" if missing else ""
        say(f"{done} tasks {words}{rest}")
    return 1 if missing else 0


def _ask(run: Path | None, endpoint: str, call: Callable[[BufferAdmin], Awaitable[T]]) -> T:
    """Asks the buffer service at `endpoint`, or, if that is empty, the run's own.

    Raises:
        NotFound: The run's own has ended with it.
    """
    address, security = endpoint, SecurityConfig()
    if not endpoint:
        folder = find_run(run)
        if _buffer_ended(folder):
            raise NotFound(f"{folder.path}: not running; run it again, and its ledger is there")
        config = load_service_config(folder.config_file)
        address, security = config.endpoints.buffer, config.security

    async def ask() -> T:
        connection = BufferConnection(address, Security.load(security))
        try:
            return await call(BufferAdmin(connection))
        finally:
            await connection.close()

    return asyncio.run(ask())

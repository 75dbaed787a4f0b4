"""`areal dead-letters`: lists tasks that failed for good and why, retries or drops them."""

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
from areal.errors import InvalidInput
from areal.protocol.leases import DeadLetter, TaskRecord
from areal.security import Security
from areal.types import Purpose, Task, TaskState, WorkflowSpec
from areal_launch.run_folder import RunFolder, find_run
from areal_launch.view.output import print_event, say

T = TypeVar("T")

# Lines of a traceback for people; its end says most, --json has all.
_TRACEBACK_LINES = 12
# Of a run that has ended.
_KEPT = 200


def describe(letter: DeadLetter, now: float) -> str:
    """A dead letter for people: heading, cause, traceback."""
    record = letter.record
    attempts = record.attempts + record.infrastructure_attempts
    ago = f", {_age(now - record.end_time)} ago" if record.end_time is not None else ""
    lines = [f"{record.task.task_id}   {letter.cause}, {attempts} attempts{ago}"]
    lines += [f"    {line}" for line in record.reason.splitlines()]
    trace = letter.traceback.rstrip().splitlines()
    if len(trace) > _TRACEBACK_LINES:
        lines.append(f"      … {len(trace) - _TRACEBACK_LINES} lines before; --json has them")
    lines += [f"      {line}" for line in trace[-_TRACEBACK_LINES:]]
    return "\n".join(lines)


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def list_dead_letters(run: Path | None, limit: int, *, as_json: bool) -> int:
    """Prints dead letters, newest first; those that an ended run left, from its folder."""
    if limit < 1:
        raise InvalidInput(f"--limit {limit}: expected 1 or more")
    folder = find_run(run, live=False)
    if not folder.held() and folder.dead_letters_file.is_file():
        lines = folder.dead_letters_file.read_text().splitlines()
        letters = [_letter(json.loads(line)) for line in lines[:limit]]
        if not as_json:
            say(f"{folder.path} has ended; it left:\n")
    else:
        letters = _ask(run, lambda admin: admin.list_dead_letters(limit))
    if as_json:
        for letter in letters:
            say(json.dumps(_row(letter), separators=(",", ":")))
        return 0
    now = time.time()
    say("\n\n".join(describe(letter, now) for letter in letters) or "no dead letters")
    return 0


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
    rows = "".join(f"{json.dumps(_row(letter))}\n" for letter in letters)
    folder.dead_letters_file.write_text(rows)


def _row(letter: DeadLetter) -> dict[str, object]:
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


def _letter(row: Mapping[str, Any]) -> DeadLetter:
    record = TaskRecord(
        task=Task(row["task_id"], Purpose(row["purpose"]), WorkflowSpec(""), row["data"]),
        state=TaskState.DEAD_LETTERED,
        reason=row["reason"],
        attempts=row["attempts"],
        infrastructure_attempts=row["infrastructure_attempts"],
        submit_time=0.0,
        end_time=row["end_time"],
        group=None,
        step=0,
    )
    return DeadLetter(record, row["cause"], row["traceback"])


def retry_dead_letters(run: Path | None, task_ids: list[str], *, as_json: bool) -> int:
    """Queues dead letters (none named: all) again."""
    done = _ask(run, lambda admin: admin.retry_dead_letters(task_ids))
    return _report("retried", "queued again", done, task_ids, as_json=as_json)


def drop_dead_letters(
    run: Path | None, task_ids: list[str], *, everything: bool, as_json: bool
) -> int:
    """Removes dead letters from the list."""
    if bool(task_ids) == everything:
        raise InvalidInput("dead-letters drop: expected task ids, or --all")
    done = _ask(run, lambda admin: admin.drop_dead_letters(task_ids))
    return _report("dropped", "dropped", done, task_ids, as_json=as_json)


def _report(event: str, words: str, done: int, task_ids: list[str], *, as_json: bool) -> int:
    """Exit code 1 when one that was named is not on the list."""
    missing = max(0, len(set(task_ids)) - done)
    if as_json:
        print_event(event, tasks=done, not_on_the_list=missing)
    else:
        rest = f"; {missing} of them are not on the list" if missing else ""
        say(f"{done} tasks {words}{rest}")
    return 1 if missing else 0


def _ask(run: Path | None, call: Callable[[BufferAdmin], Awaitable[T]]) -> T:
    config = load_service_config(find_run(run).config_file)

    async def ask() -> T:
        connection = BufferConnection(config.endpoints.buffer, Security.load(config.security))
        try:
            return await call(BufferAdmin(connection))
        finally:
            await connection.close()

    return asyncio.run(ask())

"""What must be true of a run whose processes were killed, read from its files and its ledger."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from tests.redis_server import start_redis

from areal.clients.redis_connection import redis_prefix
from areal.runs.rollouts.reader import RolloutFolder

ENDS = ("trained", "delivered", "rejected", "cancelled", "expired", "dead_lettered")


@dataclass
class Check:
    """One thing that must hold."""

    name: str
    holds: bool
    detail: str


@dataclass
class Ledger:
    """The ledger at rest."""

    meta: dict[str, str]
    counts: dict[str, int]
    """By "all:<state>" and "<purpose>:<state>"."""
    tasks: dict[str, dict[str, str]]
    """By task id: state, purpose, reason."""
    seen: dict[int, set[int]]
    """Positions that were submitted, by epoch."""


def read_ledger(run_dir: Path, namespace: str, scratch: Path) -> Ledger:
    """Opens a copy of the append-only file that the run's Redis left."""
    import shutil

    shutil.copytree(run_dir / "redis", scratch / "redis")
    prefix = redis_prefix(namespace)
    with start_redis(scratch) as url, redis.Redis.from_url(url) as client:

        def fields(key: str) -> dict[str, str]:
            return {k.decode(): v.decode() for k, v in client.hgetall(prefix + key).items()}

        tasks: dict[str, dict[str, str]] = {}
        for key in client.scan_iter(_literally(prefix) + "task:*", count=1000):
            values = client.hmget(key, "state", "purpose", "reason")
            names = ("state", "purpose", "reason")
            tasks[key.decode().removeprefix(f"{prefix}task:")] = {
                name: (value or b"").decode() for name, value in zip(names, values, strict=True)
            }
        seen = {}
        for key in client.scan_iter(_literally(prefix) + "seen:*"):
            bits = client.get(key) or b""
            seen[int(key.decode().rpartition(":")[2])] = {
                8 * at + bit
                for at, byte in enumerate(bits)
                for bit in range(8)
                if byte >> (7 - bit) & 1
            }
        counts = {state: int(number) for state, number in fields("counts").items()}
        return Ledger(fields("meta"), counts, tasks, seen)


def _literally(prefix: str) -> str:
    return prefix.replace("[", "\\[").replace("*", "\\*")


def read_lines(file: Path) -> list[dict[str, Any]]:
    """The rows of a .jsonl file; a line that a crash cut off is left out."""
    rows = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def _some(names: list[Any]) -> str:
    """The first five, for people."""
    return ", ".join(str(name) for name in names[:5]) or "none"


def check_books(
    ledger: Ledger, run_dir: Path, *, steps: int, batch: int, problems: int, eta: int
) -> Iterator[Check]:
    """All that a finished run's books must say."""
    summary = json.loads((run_dir / "summary.json").read_text())
    rows = read_lines(run_dir / "metrics.jsonl")
    yield Check(
        "the run finished its steps",
        summary["status"] == "finished" and [row["step"] for row in rows] == [*range(1, steps + 1)],
        f"{summary['status']}, {len(rows)} of {steps} steps",
    )
    ended = {state: ledger.counts.get(f"all:{state}", 0) for state in ENDS}
    submitted = int(ledger.meta.get("submitted", 0))
    yield Check(
        "the tasks in the six final states add up to those submitted",
        submitted == sum(ended.values()) == summary["accounting"]["submitted"],
        f"{submitted} submitted = " + " + ".join(f"{n} {state}" for state, n in ended.items()),
    )
    records = Counter(f"all:{task['state']}" for task in ledger.tasks.values())
    counted = {s: n for s, n in ledger.counts.items() if s.startswith("all:") and n}
    yield Check(
        "the counter of each state equals the number of tasks in it",
        dict(records) == counted,
        f"{len(counted)} states in use",
    )
    yield from _check_batches(ledger, read_lines(run_dir / "batches.jsonl"), steps, batch)
    yield _check_kept(ledger, RolloutFolder(run_dir))
    yield _check_discarded(ledger, RolloutFolder(run_dir))
    yield from _check_epochs(ledger, problems)
    staleness = max(int(row["staleness/max"]) for row in rows)
    staleness = max(staleness, int(ledger.meta.get("staleness_max", 0)))
    yield Check(
        "staleness never exceeded its bound", staleness <= eta, f"at most {staleness}, bound {eta}"
    )
    quarter = max(1, len(rows) // 4)
    rewards = [float(row["reward/mean"]) for row in rows]
    first, last = sum(rewards[:quarter]) / quarter, sum(rewards[-quarter:]) / quarter
    yield Check(
        "the reward rises",
        last > first + 0.05,
        f"{first:.2f} -> {last:.2f} (first and last {quarter} steps)",
    )


def _check_batches(
    ledger: Ledger, rows: list[dict[str, Any]], steps: int, batch: int
) -> Iterator[Check]:
    """batches.jsonl against itself and against what the ledger calls trained."""
    given: dict[int, list[str]] = {}
    changed = []
    for row in rows:
        if given.setdefault(row["step"], row["task_ids"]) != row["task_ids"]:
            changed.append(row["step"])
    again = sum(1 for row in rows if row["replay"])
    yield Check(
        "a repeated step gets the same tasks",
        not changed,
        f"{again} steps repeated; with other tasks: {_some(changed)}",
    )
    times = Counter(task_id for ids in given.values() for task_id in ids)
    twice = [task_id for task_id, n in times.items() if n > 1]
    trained = {id_ for id_, task in ledger.tasks.items() if task["state"] == "trained"}
    yield Check(
        "no task is in two committed steps",
        not twice and sorted(given) == [*range(1, steps + 1)],
        f"{len(times)} tasks in {len(given)} steps; in two steps: {_some(twice)}",
    )
    yield Check(
        "the tasks of all steps are exactly those in the state trained",
        set(times) == trained and len(trained) == steps * batch,
        f"{len(trained)} trained, {len(set(times) ^ trained)} differ",
    )


def _check_kept(ledger: Ledger, folder: RolloutFolder) -> Check:
    """The run folder's Parquet has each group that was trained on, whole and once."""
    kept = Counter((step, task_id) for step in folder.steps for task_id in folder.groups(step))
    samples = Counter(each.trajectory_id for each in folder.read())
    trained = {id_ for id_, task in ledger.tasks.items() if task["state"] == "trained"}
    twice = [name for name, n in samples.items() if n > 1]
    found = [task_id for _, task_id in kept]
    return Check(
        "each group that was trained on is kept once",
        sorted(found) == sorted(trained) and not twice,
        f"{len(found)} kept, {len(set(found) ^ trained)} differ; kept twice: {_some(twice)}",
    )


def _check_discarded(ledger: Ledger, folder: RolloutFolder) -> Check:
    """The run folder's Parquet has each task that ended untrained, once a lease, with its cause."""
    found = folder.discarded()
    ends = Counter((one.trajectory_id, one.outcome) for one in found)
    twice = [name for name, n in ends.items() if n > 1]
    wrong: list[str] = []
    for state in ("rejected", "expired", "dead_lettered"):
        kept = {one.task_id for one in found if one.outcome == state and one.cause}
        ended = {
            id_
            for id_, task in ledger.tasks.items()
            if task["state"] == state and task["purpose"] == "train"
        }
        # A dead letter that was tried again is there, and ended in another way later.
        wrong += sorted(ended - kept if state == "dead_lettered" else ended ^ kept)
    return Check(
        "each task that ended without being trained on is kept once, with its cause",
        not twice and not wrong,
        f"{len({one.task_id for one in found})} kept, {len(wrong)} differ: {_some(wrong)}; "
        f"kept twice: {_some(twice)}",
    )


def _check_epochs(ledger: Ledger, problems: int) -> Iterator[Check]:
    """No prompt is skipped: positions are submitted in order, and each has ended."""
    last = max(ledger.seen, default=0)
    skipped, open_ = [], []
    trained = named = 0
    of_last = max(ledger.seen.get(last, {-1})) + 1
    for epoch in range(last + 1):
        seen = ledger.seen.get(epoch, set())
        expected = problems if epoch < last else of_last
        skipped += [f"e{epoch}-{index}" for index in range(expected) if index not in seen]
        for index in seen:
            task = ledger.tasks.get(f"e{epoch}-{index}", {"state": "unknown", "reason": ""})
            if task["state"] == "trained":
                trained += 1
            elif task["state"] in ENDS and task["reason"]:
                named += 1
            else:
                open_.append(f"e{epoch}-{index} is {task['state']}")
    yield Check(
        "each prompt of each epoch was trained on once or ended with a recorded cause",
        not skipped and not open_,
        f"{last} epochs of {problems} prompts and {of_last} of the next: {trained} trained on, "
        f"{named} ended with a recorded cause; "
        f"skipped: {_some(skipped)}, not ended: {_some(open_)}",
    )

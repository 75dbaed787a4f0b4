"""What an fsync before every acknowledgement costs: CompleteTasks under each appendfsync policy.

    PYTHONPATH=services:. python tools/bench/durability.py [--tasks 400]     # a table, then JSON

One real Redis per policy runs on this disk, with the ledger's own scripts and groups of a given
size. `together` is the number of completions in flight. Redis answers all completions that arrived
in one turn of its loop after one fsync, so they share it. fsyncs are counted by strace if it is
installed. Policies alternate; figures are medians of three rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "services")]

POLICIES = ("no", "everysec", "always")
ROUNDS = 3


async def complete_all(url: str, tasks: int, size: int, together: int) -> dict[str, float]:
    """Completes `tasks` groups of `size` bytes; rate and latencies in milliseconds."""
    from tests.ledger_support import complete, finished, open_book

    async with open_book(
        url, max_concurrent_rollouts=10**6, max_head_offpolicyness=10**4, batch_size=10**3
    ) as book:
        ids = [f"t{number}" for number in range(tasks)]
        await book.submit(*ids)
        leases: dict[str, int] = {}
        while len(leases) < tasks:
            leases.update(await book.lease(200))
        waiting = iter(ids)
        milliseconds: list[float] = []
        payload = finished("x").payload.ljust(size, b"\0")

        async def work() -> None:
            for task_id in waiting:
                group = replace(finished(task_id), payload=payload)
                began = time.perf_counter()
                await complete(book.store, leases[task_id], group)
                milliseconds.append((time.perf_counter() - began) * 1000)

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(together)))
        seconds = time.perf_counter() - began
        await book.redis.flushall()  # type: ignore[attr-defined]
    milliseconds.sort()
    return {
        "per_s": tasks / seconds,
        "p50_ms": statistics.median(milliseconds),
        "p99_ms": milliseconds[int(0.99 * (len(milliseconds) - 1))],
    }


def fsyncs(url: str, pid: int, tasks: int, size: int, together: int) -> float | None:
    """System calls fsync and fdatasync per completion; None without strace."""
    strace = shutil.which("strace")
    if strace is None:
        return None
    with tempfile.NamedTemporaryFile() as output:
        tracer = subprocess.Popen(
            [strace, "-f", "-e", "trace=fsync,fdatasync", "-o", output.name, "-p", str(pid)],
            stderr=subprocess.DEVNULL,
        )
        time.sleep(0.5)
        before = Path(output.name).read_text().count("sync(")
        asyncio.run(complete_all(url, tasks, size, together))
        tracer.terminate()
        tracer.wait(10)
        total = Path(output.name).read_text().count("sync(") - before
    # Submitting and leasing are a handful of calls.
    return max(0, total - 2 - tasks // 200 - tasks // 500) / tasks


def fsync_milliseconds(folder: Path) -> float:
    """This disk: one append of 16 KiB and its fdatasync, the median of 50."""
    import os

    found = []
    with (folder / "probe").open("ab", buffering=0) as file:
        for _ in range(50):
            file.write(b"x" * 16384)
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            found.append((time.perf_counter() - began) * 1000)
    return statistics.median(found)


def main() -> None:
    """Measures each setting and prints."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", type=int, default=400)
    tasks = parser.parse_args().tasks
    from tests.redis_server import RedisServer

    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        disk = fsync_milliseconds(folder)
        servers = {policy: RedisServer(folder / policy, appendfsync=policy) for policy in POLICIES}
        try:
            for server in servers.values():
                server.start()
            for kib in (16, 256):
                for together in (1, 8, 64):
                    found: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
                    for _ in range(ROUNDS):
                        for policy, server in servers.items():
                            result = complete_all(server.url, tasks, kib * 1024, together)
                            found[policy].append(asyncio.run(result))
                    always = servers["always"]
                    syncs = fsyncs(always.url, always.pid, tasks, kib * 1024, together)
                    for policy in POLICIES:
                        row = {
                            key: statistics.median(each[key] for each in found[policy])
                            for key in found[policy][0]
                        }
                        rows.append(
                            {
                                "kib": kib,
                                "together": together,
                                "policy": policy,
                                **row,
                                "fsyncs_per_group": syncs if policy == "always" else None,
                            }
                        )
        finally:
            for server in servers.values():
                server.kill()
    print(f"fdatasync of 16 KiB on this disk: {disk:.2f} ms")
    print(" KiB together    policy  groups/s  p50 ms  p99 ms fsyncs")
    for row in rows:
        syncs = row["fsyncs_per_group"]
        print(
            f"{row['kib']:>4} {row['together']:>8} {row['policy']:>9} {row['per_s']:>9.0f} "
            f"{row['p50_ms']:>7.2f} {row['p99_ms']:>7.2f} "
            + (f"{syncs:.2f} per group" if syncs is not None else "")
        )
    print(json.dumps({"fdatasync_ms": disk, "rows": rows}))


if __name__ == "__main__":
    main()

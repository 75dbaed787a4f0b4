"""The ledger's throughput through gRPC, compared with redis-py alone moving the same bytes.

    python tools/bench/ledger.py             # a table, then one JSON line
    python -m venv PEER && PEER/bin/pip install TransferQueue==0.1.11
    python tools/bench/ledger.py --transferqueue PEER/bin/python
    python tools/bench/ledger.py --appendfsync everysec

Ours is pipelined, as in a run: a rollout process reports groups while a trainer process takes them.
Both use their real clients, and the buffer service is a process of its own. Four batches are being
reported at any time. The trainer takes and fetches step k + 1 while it commits step k, which
releases k. The measured time is from the first report to the last commit. It includes encoding,
compression, every check, the state machine of each group, and decoding, but not making the arrays,
tasks and leases.

redis-py has a writer and a reader process with four pipelines in flight each. A SET stores a group,
the number of a batch goes to a list on which the reader waits, and GETDEL reads the groups. Server,
settings, and bytes before compression are the same; there is no encoding. Groups are four
trajectories of equal length. Redis has the settings of launcher, chart and Compose, so acknowledged
data of both is on disk. With `--appendfsync everysec`, no call waits for the disk.

The gRPC relay is what a ledger behind Python's gRPC could reach at best. It runs the same pipelines
in a process of its own, which checks and remembers nothing. Its writer sends groups that are packed
already, in messages as large as our client's. Its reader takes a batch with one call, and unpacks
nothing. Four calls of each are in flight.

One by one: a group is reported, taken and committed before the next call begins, and each call
waits for the disk; the relay's groups are put and taken.

TransferQueue, verl's queue, runs in its own environment: put and get of rows of 64 KiB, a batch at
a time, in memory (`peers/transferqueue.py`). Contenders alternate. Medians are printed, with the
CPU that each process used per group, which a busy machine changes less than rates.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from redis import Redis

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "services"))

from peers.process import Peer
from tests.buffer_server import start_buffer
from tests.redis_server import RedisServer

ROOT = Path(__file__).parents[2]
TARGET = 0.5
PEER_TARGETS = {1: 10, 8: 3, 64: 3}
TOGETHER = 4
# KiB, groups a batch, batches under way; so many groups.
CASES = [
    (kib, batch, TOGETHER, 1024 if batch > 1 else 384) for kib in (16, 64) for batch in (1, 8, 64)
]
CASES += [(256, batch, TOGETHER, 256) for batch in (1, 8, 64)]
CASES += [(kib, 1, 1, 128) for kib in (16, 64, 256)]


def fdatasync_ms(folder: Path) -> float:
    """One append of 16 KiB and its fdatasync on this disk: the median of 30."""
    found = []
    with (folder / "probe").open("ab", buffering=0) as file:
        for _ in range(30):
            file.write(b"x" * 16384)
            begin = time.perf_counter()
            os.fdatasync(file.fileno())
            found.append((time.perf_counter() - begin) * 1000)
    return statistics.median(found)


@contextmanager
def start_relay(redis_url: str) -> Iterator[tuple[str, int]]:
    """A gRPC server with nothing between it and Redis: its address and process id."""
    command = [sys.executable, str(Path(__file__).parent / "peers" / "relay.py"), redis_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"127.0.0.1:{int(process.stdout.readline())}", process.pid
        finally:
            process.kill()


class Rig:
    """The processes of one run: a writer, a reader, a server, Redis, and what they cost."""

    def __init__(self, address: str, relay: tuple[str, int], redis: RedisServer) -> None:
        self._sides = [
            Peer(sys.executable, "queue_side.py", side, address, relay[0], redis.url)
            for side in ("write", "read")
        ]
        children = psutil.Process().children()
        buffer = next(child for child in children if "areal_buffer" in child.cmdline())
        self._servers = {"ours": buffer, "gRPC relay": psutil.Process(relay[1])}
        self._redis = psutil.Process(redis.pid)
        for side in self._sides:
            side.ready()

    def run(
        self, who: str, kib: int, batch: int, together: int, count: int
    ) -> tuple[float, dict[str, float]]:
        """(seconds, CPU seconds of each process) for `count` groups."""
        write, read = self._sides
        case = {"who": who, "kib": kib, "batch": batch, "together": together, "count": count}
        for side in (read, write):  # the reader submits what the writer leases
            case |= {"do": "prepare", "tag": uuid.uuid4().hex[:8] if side is read else case["tag"]}
            side.ask(**case)
        before = self._server_seconds(who)
        if together > 1:
            read.tell(do="go")
            write.tell(do="go")
            wrote, got = write.answer(), read.answer()
            seconds = got["end"] - wrote["begin"]
        else:
            wrote, got = write.ask(do="go"), read.ask(do="go")
            seconds = sum(each["end"] - each["begin"] for each in (wrote, got))
        spent = {name: at - before[name] for name, at in self._server_seconds(who).items()}
        return seconds, {"write": wrote["cpu"], "read": got["cpu"], **spent}

    def _server_seconds(self, who: str) -> dict[str, float]:
        times = {"redis": self._redis.cpu_times()}
        if who in self._servers:
            times = {"server": self._servers[who].cpu_times()} | times
        return {name: each.user + each.system for name, each in times.items()}

    def close(self) -> None:
        """Ends the writer and the reader."""
        for side in self._sides:
            side.close()


def measure_case(
    rig: Rig, peer: Peer | None, rounds: int, case: tuple[int, int, int, int]
) -> dict[str, Any]:
    """Alternates the contenders; groups per second, ratios, CPU µs per group and process."""
    kib, batch, together, count = case
    contenders = ["ours", "gRPC relay", "redis-py"]
    contenders += ["TransferQueue"] if peer is not None and kib == 64 else []
    seconds: dict[str, list[float]] = defaultdict(list)
    costs: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(rounds + 1):
        for who in contenders[:: 1 if number % 2 else -1]:
            cost: dict[str, float] = {}
            if who == "TransferQueue":
                assert peer is not None
                took = peer.ask(kib=kib, batch=batch, count=count, together=together)
            else:
                took, cost = rig.run(who, *case)
            if number == 0:  # the first round warms up
                continue
            seconds[who].append(took)
            for process, spent in cost.items():
                costs[who][process].append(spent)
    rates = {who: round(count / statistics.median(each)) for who, each in seconds.items()}
    row: dict[str, Any] = {"kib": kib, "batch": batch, "pipelined": together > 1, "rates": rates}
    row["ratios"] = {
        who: round(rates["ours"] / rate, 3) for who, rate in rates.items() if who != "ours"
    }
    row["cpu_us"] = {
        who: {name: round(statistics.mean(each) / count * 1e6) for name, each in found.items()}
        for who, found in costs.items()
    }
    how = "pipelined" if together > 1 else "one by one"
    for who, rate in rates.items():
        ratio = f"{row['ratios'][who]:9.2f}" if who != "ours" else " " * 9
        cost = row["cpu_us"].get(who, {})
        cells = "".join(f"{cost.get(name, ''):7}" for name in ("write", "read", "server", "redis"))
        print(f"{kib:4}{batch:6}  {how:11}{who:14}{rate:8}{ratio}  {cells}", flush=True)
    return row


def measure(rig: Rig, peer: Peer | None, rounds: int, only_kib: int) -> list[dict[str, Any]]:
    """One row per case."""
    print(
        f"{'KiB':>4}{'batch':>6}  {'':11}{'contender':14}{'groups/s':>8}{'ours / it':>9}  "
        "CPU µs a group: writer, reader, server, Redis"
    )
    cases = [case for case in CASES if only_kib in (0, case[0])]
    return [measure_case(rig, peer, rounds, case) for case in cases]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kib", type=int, default=0, help="only groups of this size")
    parser.add_argument("--appendfsync", choices=("always", "everysec"), default="always")
    parser.add_argument("--transferqueue", metavar="PYTHON", default="")
    options = parser.parse_args()
    # The service's process finds the package from here.
    os.chdir(ROOT)
    python = options.transferqueue
    peer = Peer(python, "transferqueue.py").ready() if python else None
    try:
        with tempfile.TemporaryDirectory() as folder:
            disk_ms = fdatasync_ms(Path(folder))
            redis = RedisServer(Path(folder) / "redis", options.appendfsync)
            redis.start()
            # It would rewrite its file beside what is being measured when the time has come.
            with Redis.from_url(redis.url) as client:
                client.config_set("auto-aof-rewrite-percentage", 0)
            try:
                with (
                    start_buffer(Path(folder), redis.url, "rollout.lease_ttl_s=600") as address,
                    start_relay(redis.url) as relay,
                ):
                    load = os.getloadavg()[0]
                    rig = Rig(address, relay, redis)
                    try:
                        rows = measure(rig, peer, options.rounds, options.kib)
                    finally:
                        rig.close()
            finally:
                redis.kill()
    finally:
        if peer is not None:
            peer.close()
    for row in rows:
        if row["kib"] == 64 and row["pipelined"]:
            rates, ratios = row["rates"], row["ratios"]
            print(
                f"64 KiB, batch {row['batch']}: {ratios['redis-py']:.2f} of redis-py (target "
                f"{TARGET}); what any ledger behind python gRPC can reach, the bare relay: "
                f"{rates['gRPC relay'] / rates['redis-py']:.2f}, and ours "
                f"{ratios['gRPC relay']:.2f} of that"
            )
    if peer is None:
        print("TransferQueue: not run, no --transferqueue PYTHON was given (see --help)")
    for row in rows:
        if "TransferQueue" in row["ratios"]:
            target = PEER_TARGETS[row["batch"]]
            ratio = row["ratios"]["TransferQueue"]
            how = "pipelined" if row["pipelined"] else "one by one"
            print(f"batch {row['batch']} {how}: {ratio:.1f} x TransferQueue (target {target})")
    print(
        f"appendfsync {options.appendfsync}; fdatasync on this disk: {disk_ms:.2f} ms; "
        f"load average before: {load:.1f}"
    )
    print(
        json.dumps(
            {
                "bench": "ledger",
                "target": TARGET,
                "appendfsync": options.appendfsync,
                "load": round(load, 1),
                "fdatasync_ms": round(disk_ms, 2),
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()

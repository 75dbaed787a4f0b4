"""The ledger's throughput through gRPC, against redis-py alone moving the same bytes.

    python tools/bench/ledger.py             # a table, then one JSON line
    python -m venv PEER && PEER/bin/pip install TransferQueue==0.1.11
    python tools/bench/ledger.py --transferqueue PEER/bin/python

Pipelined, as a run is: a rollout process hands groups in while a trainer process takes them, with
the clients that both really use, through the buffer service as its own process. Four batches are
being handed in at any time. The trainer takes step k + 1 and fetches it while it commits step k,
which lets k go. The clock runs from the first hand-in to the last commit, and includes encoding,
compression, every check, the state machine of each group, and decoding; making the arrays, tasks
and leases does not count. redis-py gets the same: a writer and a reader process, each with four
pipelines under way; a SET per group, and the batch's number to a list on which the reader waits;
then GETDEL. Same server, same settings (append-only, fsync every second), same bytes before
compression, no encoding. Groups are four trajectories of equal length.

One at a time: a group is handed in, taken, fetched and committed before the next call begins. What
no ledger behind python gRPC can pass there is four calls to a server that does nothing, the first
carrying the bytes: the gRPC bound. With `appendfsync always`, three of them also wait for the disk.

TransferQueue, verl's queue, in its own environment: put and get of rows of 64 KiB, so many at a
time, in memory (`peers/transferqueue.py`). Contenders alternate; medians are printed, with the CPU
that each process spent per group, which a busy machine disturbs less than rates.
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
from pathlib import Path
from typing import Any

import grpc
import psutil
import uvloop

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


async def serve_echo() -> None:
    """A gRPC server that reads a message and answers nothing."""

    async def swallow(_: bytes, __: Any) -> bytes:
        return b""

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(swallow)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("bench", {"swallow": handler}),)
    )
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


async def run_echo(port: int, kib: int, count: int) -> float:
    """Seconds for `count` groups: a call with the bytes and three without, one by one."""
    payload = os.urandom(kib * 1024)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/bench/swallow")
        await call(payload)
        begin = time.perf_counter()
        for _ in range(count):
            await call(payload)
            for _ in range(3):
                await call(b"")
    return time.perf_counter() - begin


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


class Rig:
    """The processes of one run: a writer, a reader, the buffer, Redis, and what they cost."""

    def __init__(self, address: str, url: str, redis_pid: int) -> None:
        self._sides = [
            Peer(sys.executable, "queue_side.py", side, address, url) for side in ("write", "read")
        ]
        children = psutil.Process().children()
        buffer = next(child for child in children if "areal_buffer" in child.cmdline())
        self._servers = {"buffer": buffer, "redis": psutil.Process(redis_pid)}
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
        before = self._server_seconds()
        if together > 1:
            read.tell(do="go")
            write.tell(do="go")
            wrote, got = write.answer(), read.answer()
            seconds = got["end"] - wrote["begin"]
        else:
            wrote, got = write.ask(do="go"), read.ask(do="go")
            seconds = sum(each["end"] - each["begin"] for each in (wrote, got))
        spent = {name: at - before[name] for name, at in self._server_seconds().items()}
        return seconds, {"write": wrote["cpu"], "read": got["cpu"], **spent}

    def _server_seconds(self) -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in self._servers.items()}
        return {name: each.user + each.system for name, each in times.items()}

    def close(self) -> None:
        """Ends both sides."""
        for side in self._sides:
            side.close()


def measure_case(
    rig: Rig, port: int, peer: Peer | None, rounds: int, case: tuple[int, int, int, int]
) -> dict[str, Any]:
    """Alternates the contenders; groups per second, ratios, CPU µs per group and process."""
    kib, batch, together, count = case
    contenders = ["ours", "redis-py"]
    contenders += ["gRPC bound"] if together == 1 else []
    contenders += ["TransferQueue"] if peer is not None and kib == 64 else []
    seconds: dict[str, list[float]] = defaultdict(list)
    costs: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number in range(rounds + 1):
        for who in contenders[:: 1 if number % 2 else -1]:
            cost: dict[str, float] = {}
            if who == "gRPC bound":
                took = uvloop.run(run_echo(port, kib, count))
            elif who == "TransferQueue":
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
        cells = "".join(f"{cost:7}" for cost in row["cpu_us"].get(who, {}).values())
        print(f"{kib:4}{batch:6}  {how:11}{who:14}{rate:8}{ratio}  {cells}", flush=True)
    return row


def measure(
    rig: Rig, port: int, peer: Peer | None, rounds: int, only_kib: int
) -> list[dict[str, Any]]:
    """One row per case."""
    print(
        f"{'KiB':>4}{'batch':>6}  {'':11}{'contender':14}{'groups/s':>8}{'ours / it':>9}  "
        "CPU µs a group: writer, reader, buffer, Redis"
    )
    cases = [case for case in CASES if only_kib in (0, case[0])]
    return [measure_case(rig, port, peer, rounds, case) for case in cases]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kib", type=int, default=0, help="only groups of this size")
    parser.add_argument("--transferqueue", metavar="PYTHON", default="")
    parser.add_argument("--echo", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.echo:
        uvloop.run(serve_echo())
        return
    # The service's process finds the package from here.
    os.chdir(ROOT)
    python = options.transferqueue
    peer = Peer(python, "transferqueue.py").ready() if python else None
    echo = subprocess.Popen([sys.executable, __file__, "--echo"], stdout=subprocess.PIPE, text=True)
    try:
        assert echo.stdout is not None
        port = int(echo.stdout.readline())
        with tempfile.TemporaryDirectory() as folder:
            disk_ms = fdatasync_ms(Path(folder))
            redis = RedisServer(Path(folder) / "redis")
            redis.start()
            try:
                with start_buffer(Path(folder), redis.url, "rollout.lease_ttl_s=600") as address:
                    load = os.getloadavg()[0]
                    rig = Rig(address, redis.url, redis.pid)
                    try:
                        rows = measure(rig, port, peer, options.rounds, options.kib)
                    finally:
                        rig.close()
            finally:
                redis.kill()
    finally:
        echo.kill()
        echo.wait()
        if peer is not None:
            peer.close()
    for row in rows:
        if row["kib"] == 64 and row["pipelined"]:
            ratio = row["ratios"]["redis-py"]
            print(f"64 KiB, batch {row['batch']}: {ratio:.2f} of redis-py (target {TARGET})")
    if peer is None:
        print("TransferQueue: not run, no --transferqueue PYTHON was given (see --help)")
    for row in rows:
        if "TransferQueue" in row["ratios"]:
            target = PEER_TARGETS[row["batch"]]
            ratio = row["ratios"]["TransferQueue"]
            how = "pipelined" if row["pipelined"] else "one by one"
            print(f"batch {row['batch']} {how}: {ratio:.1f} x TransferQueue (target {target})")
    print(f"fdatasync on this disk: {disk_ms:.2f} ms; load average before: {load:.1f}")
    print(
        json.dumps(
            {
                "bench": "ledger",
                "target": TARGET,
                "load": round(load, 1),
                "fdatasync_ms": round(disk_ms, 2),
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()

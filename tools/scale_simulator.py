"""What the control plane costs as it grows: simulated servers, everything else is real.

    python tools/scale_simulator.py                                       # minutes on two cores
    python tools/scale_simulator.py --servers 1000 --episodes 50000 --replicas 4

For each number of servers: a fresh stack (Redis, NATS, buffer, reward, weight-sync, rollout
replicas, each its own process) drives so many simulated servers, with so many episodes in flight.
Reported: CPU of each service per episode, memory of the rollout replicas per episode in flight, the
time from publishing a version until every server serves it, and how these grow from the smallest
number of servers to the largest. Episodes last as long as they must for `--rate` of them to end per
second. A table, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "services"))

from tests.nats_server import start_nats
from tests.redis_server import start_redis
from tests.rollout_stack import Stack, free_port

from areal.clients.buffer import BufferClient
from areal.clients.stores import connect_redis
from areal.clients.weight_sync import WeightSyncClient
from areal.config import GRPOConfig, save_config
from areal.models.tiny import make_tiny_model
from areal.recipe import describe_workflow
from areal.types import GenerationHyperparameters, Purpose, Task, TaskState
from areal.weights import build_manifest
from areal.wire import STATE_FROM_PB
from areal.workflows.rlvr import RLVRWorkflow

ROOT = Path(__file__).parents[1]
SERVICES = ("rollout", "buffer", "weight_sync", "reward")
CONNECTIONS = 15_000
"""Of one process: below a limit of 20,000 open files."""
TOKENS = 64
QUADRATIC = 3.0
"""A cost that grows by more than this over a tenfold size is worth a look."""


def start_servers(stack: ExitStack, count: int, options: argparse.Namespace) -> list[str]:
    """Urls of so many simulated servers, in as few processes as their connections allow."""
    # A request lasts as long as it takes for `rate` of them to end per second.
    speed = TOKENS * options.rate / options.episodes
    processes = min(count, math.ceil((options.episodes + 4 * count) / CONNECTIONS))
    urls: list[str] = []
    for index in range(processes):
        share = count // processes + (index < count % processes)
        process = subprocess.Popen(
            [
                *(sys.executable, str(ROOT / "tools" / "scale_servers.py")),
                *("--count", str(share), "--speed", str(speed), "--tokens", str(TOKENS)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        stack.callback(process.wait, 10)
        stack.callback(process.kill)
        assert process.stdout is not None
        urls += [f"http://127.0.0.1:{port}" for port in json.loads(process.stdout.readline())]
    return urls


def start_services(
    stack: ExitStack, folder: Path, servers: list[str], options: argparse.Namespace
) -> Stack:
    """Everything real, each in its own process."""
    config = GRPOConfig(experiment_name="scale", trial_name=f"t{uuid.uuid4().hex[:8]}")
    config.run_root = str(folder / "runs")
    config.model.path = str(make_tiny_model(folder / "model", seed=1))
    config.model.context_length = 2048
    config.rollout.max_concurrent_rollouts = options.episodes
    # It must end on a busy machine; what is measured is work, not patience.
    config.rollout.setup_timeout_s = config.rollout.request_timeout_s = 1200.0
    config.rollout.lease_ttl_s = 60.0
    config.weight_sync.probe_interval_s = max(1.0, len(servers) / 100)
    config.endpoints.redis = stack.enter_context(start_redis(folder))
    config.endpoints.nats = stack.enter_context(start_nats(folder))
    for name in SERVICES:
        setattr(config.endpoints, name, f"127.0.0.1:{free_port()}")
    config.endpoints.inference = servers
    whole = Stack(folder, config)
    save_config(config, whole.config_file)
    stack.callback(whole.close)
    for name in ("buffer", "reward", "weight_sync"):
        whole.service(name, getattr(config.endpoints, name))
        whole.wait(name, getattr(config.endpoints, name))
    return whole


def cpu_seconds(whole: Stack, name: str) -> float:
    total = 0.0
    for process_name, process in whole.processes.items():
        if process_name.rstrip("0123456789-") == name:
            tree = psutil.Process(process.pid)
            for each in (tree, *tree.children(recursive=True)):
                times = each.cpu_times()
                total += times.user + times.system
    return total


def rollout_memory(whole: Stack) -> int:
    return sum(
        psutil.Process(process.pid).memory_info().rss
        for name, process in whole.processes.items()
        if name.startswith("rollout")
    )


async def simulate(count: int, options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """One number of servers."""
    with ExitStack() as stack:
        servers = start_servers(stack, count, options)
        whole = start_services(stack, folder, servers, options)
        ends = whole.config.endpoints
        ledger, sync = BufferClient(ends.buffer), WeightSyncClient(ends.weight_sync)
        redis = connect_redis(ends.redis)
        await sync.wait_for(
            f"{count} servers at version 0", lambda s: s.confirmed_servers == count, timeout=600
        )
        result = {"servers": float(count)}
        for index in range(options.replicas):
            address = f"127.0.0.1:{free_port()}"
            whole.service("rollout", address, f"rollout-{index}")
            whole.wait(f"rollout-{index}", address)

        gconfig = GenerationHyperparameters(max_new_tokens=4 * TOKENS - 1)
        workflow = describe_workflow(RLVRWorkflow("multiple_choice", gconfig))
        row = {"messages": [{"role": "user", "content": "12+34="}], "answer": "B"}
        numbers = itertools.count()

        async def submit(tasks: int) -> None:
            await ledger.submit_tasks(
                [Task(f"t{next(numbers)}", Purpose.SERVE, workflow, row) for _ in range(tasks)],
                retry_for=120.0,
                timeout=120.0,
            )

        async def counts() -> dict[TaskState, int]:
            stats = await ledger.get_stats(timeout=60.0)
            return {STATE_FROM_PB[each.state]: each.tasks for each in stats.counts}

        empty = rollout_memory(whole)
        wanted = int(2 * options.episodes + options.rate * options.seconds * 6)
        await submit(wanted)
        async with asyncio.timeout(900):
            # The ledger announces no number of running tasks.
            while (await counts())[TaskState.RUNNING] < 0.97 * options.episodes:  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        result["bytes_per_episode"] = (rollout_memory(whole) - empty) / options.episodes

        async with asyncio.timeout(900):
            # All began at once: half of them later, ends are spread out.
            while (await counts())[TaskState.DELIVERED] < 0.5 * options.episodes:  # noqa: ASYNC110
                await asyncio.sleep(0.2)

        async def meter() -> dict[str, float]:
            info = await redis.info("cpu")
            used = {name: cpu_seconds(whole, name) for name in SERVICES}
            used["redis"] = info["used_cpu_user"] + info["used_cpu_sys"]
            done = (await counts())[TaskState.DELIVERED]
            return {**used, "done": done, "time": time.perf_counter()}

        before = await meter()
        await asyncio.sleep(options.seconds)
        after = await meter()
        done = max(1.0, after["done"] - before["done"])
        for name in (*SERVICES, "redis"):
            result[f"{name}_us"] = 1e6 * (after[name] - before[name]) / done
        result["episodes_per_s"] = done / (after["time"] - before["time"])

        fan_outs, spent = [], []
        for version in range(1, options.updates + 1):
            path = shutil.copytree(whole.config.model.path, folder / f"version-{version}")
            policy = replace(build_manifest(Path(path), version, 1), path=str(path))
            used, began = cpu_seconds(whole, "weight_sync"), time.perf_counter()
            await sync.publish_version(policy)
            await sync.wait_for(
                f"{count} servers at version {version}",
                lambda s, v=version: s.confirmed_version == v and s.confirmed_servers == count,
                timeout=600,
            )
            fan_outs.append(time.perf_counter() - began)
            spent.append((cpu_seconds(whole, "weight_sync") - used) / count)
        result["fan_out_s"] = statistics.median(fan_outs)
        result["update_us_per_server"] = 1e6 * statistics.median(spent)
        known = await counts()
        whole_states = (TaskState.QUEUED, TaskState.RUNNING, TaskState.DELIVERED)
        result["lost"] = float(wanted - sum(known[state] for state in whole_states))
        await redis.aclose()
        for client in (ledger, sync):
            await client.close()
    return {key: round(value, 3) for key, value in result.items()}


def growth(rows: list[dict[str, float]]) -> dict[str, float]:
    """How much each cost grows per tenfold number of servers; 1: not at all, 10: linearly."""
    first, last = rows[0], rows[-1]
    tens = math.log10(last["servers"] / first["servers"])
    if not tens:
        return {}
    keys = [k for k in first if k.endswith(("_us", "_s", "bytes_per_episode", "per_server"))]
    return {
        key: round((max(last[key], 1e-9) / max(first[key], 1e-9)) ** (1 / tens), 2)
        for key in keys
        if key != "episodes_per_s"
    }


def main() -> int:
    """Prints the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--servers", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--episodes", type=int, default=2000, help="in flight")
    parser.add_argument("--replicas", type=int, default=2, help="rollout processes")
    parser.add_argument("--rate", type=float, default=80.0, help="episodes that end per second")
    parser.add_argument("--seconds", type=float, default=15.0, help="of steady state")
    parser.add_argument("--updates", type=int, default=3)
    options = parser.parse_args()
    rows = []
    for count in options.servers:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(asyncio.run(simulate(count, options, Path(folder))))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    columns = [key for key in rows[0] if key != "servers"]
    print(f"{'':22s}" + "".join(f"{row['servers']:>12.0f}" for row in rows) + f"{'x 10':>8s}")
    grows = growth(rows)
    for key in columns:
        cells = "".join(f"{row[key]:12.3f}" for row in rows)
        print(f"{key:22s}{cells}{grows.get(key, ''):>8}")
    # The fan-out is linear in the servers: each takes its own update. Nothing may be worse.
    worst = max((v for k, v in grows.items() if k != "fan_out_s"), default=1.0)
    result = {"bench": "scale", "load": round(os.getloadavg()[0], 1), "episodes": options.episodes}
    print(json.dumps({**result, "rows": rows, "growth": grows, "met": worst < QUADRATIC}))
    return 1 if any(row["lost"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

"""What the control plane costs as it grows: simulated servers, everything else is real.

    python tools/scale_simulator.py                                       # minutes on two cores
    python tools/scale_simulator.py 10x5000 100x5000 1000x5000 1000x50000
    python tools/scale_simulator.py 10x13000 --replicas 1 --seconds 1 --updates 0    # the drain

For each size (servers x episodes in flight): a fresh stack (Redis, NATS, buffer, reward,
weight-sync, rollout replicas, each its own process) drives so many simulated servers, with so many
episodes in flight. They last as long as they must for `--rate` of them to end per second, and begin
as if found running, so that the state is steady from the start. Reported, with the load average and
how each figure grows:

    *_us              CPU µs per episode that ended, by service
    renewal_*_us      CPU µs per lease renewed: each lease is, three times in rollout.lease_ttl_s
    *_kib             memory per episode in flight
    fan_out_s         from publishing a version until every server serves it
    paused_s          that each server stood still for such an update, on average
    *_us_per_server   CPU µs of such an update
    drain_s           from SIGTERM to the end of one rollout replica; drain_left: leases it left;
                      drain_with_tokens: share of those returned that bring tokens
                      (both of the ledger itself with `--replicas 1`)
    calls             of buffer and weight-sync in the steady state, by method: number, ms each

A table, then one JSON line.
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
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "services"))

from tests.nats_server import start_nats
from tests.redis_server import start_redis
from tests.rollout_stack import Stack, free_port
from tools import scale_meter as meter

from areal.clients.buffer.connection import BufferConnection
from areal.clients.buffer.tasks import BufferTasks
from areal.clients.buffer.worker import BufferWorker
from areal.clients.redis_connection import connect_redis
from areal.clients.weight_sync import WeightSyncClient
from areal.config.experiment import GRPOConfig, save_config
from areal.protocol.leases import Return, ReturnCause
from areal.types import GenerationHyperparameters, Purpose, Task, TaskState
from areal.weights.manifest import build_manifest
from areal.workflows.rlvr import RLVRWorkflow
from areal.workflows.specs import describe_workflow
from areal_torch.models.tiny import make_tiny_model

ROOT = Path(__file__).parents[1]
SERVICES = ("rollout", "buffer", "weight_sync", "reward")
CONNECTIONS = 15_000
"""Connections of one process: below a limit of 20,000 open files."""
TOKENS = 64
MEAN = 1.2
"""Mean length / median length of the log-normal answers."""
RENEWALS = 2000
QUADRATIC = 3.0
"""A cost that grows by more than this over a tenfold size is worth a look."""


def say(text: str) -> None:
    """Prints progress to standard error."""
    print(f"{time.strftime('%H:%M:%S')} load {os.getloadavg()[0]:.1f}: {text}", file=sys.stderr)


def start_servers(
    stack: ExitStack, count: int, episodes: int, options: argparse.Namespace
) -> list[str]:
    """Urls of so many simulated servers, in as few processes as their connections allow."""
    # A request lasts as long as it takes for `rate` of them to end per second.
    speed = MEAN * TOKENS * options.rate / episodes
    processes = min(count, math.ceil((episodes + 4 * count) / CONNECTIONS))
    urls: list[str] = []
    for index in range(processes):
        share = count // processes + (index < count % processes)
        process = subprocess.Popen(
            [
                *(sys.executable, str(ROOT / "tools" / "scale_servers.py")),
                *("--count", str(share), "--speed", str(speed), "--tokens", str(TOKENS)),
                *("--first", str(episodes // count)),
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


def start_services(stack: ExitStack, folder: Path, servers: list[str], episodes: int) -> Stack:
    """Everything real but the rollout replicas, each in its own process."""
    config = GRPOConfig(experiment_name="scale", trial_name=f"t{uuid.uuid4().hex[:8]}")
    config.run_root = str(folder / "runs")
    config.model.path = str(make_tiny_model(folder / "model", seed=1))
    config.model.context_length = 2048
    config.rollout.max_concurrent_rollouts = episodes
    # The longest answers of the slowest servers take hours, and none of them shall fail.
    config.rollout.setup_timeout_s = config.rollout.request_timeout_s = 100_000.0
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


class Simulation:
    """One size, with everything but the rollout replicas running."""

    def __init__(self, whole: Stack, episodes: int, options: argparse.Namespace) -> None:
        self.whole, self.episodes, self.options = whole, episodes, options
        ends = whole.config.endpoints
        self.buffer = BufferConnection(ends.buffer, timeout_s=120.0, retry_s=120.0)
        self.tasks, self.worker = BufferTasks(self.buffer), BufferWorker(self.buffer)
        self.sync = WeightSyncClient(ends.weight_sync)
        self.redis = connect_redis(ends.redis)
        self.submitted = 0
        self._empty: meter.Row = {}
        gconfig = GenerationHyperparameters(max_new_tokens=4 * TOKENS - 1)
        self._workflow = describe_workflow(RLVRWorkflow("multiple_choice", gconfig))
        self._numbers = itertools.count()

    async def close(self) -> None:
        """Closes the clients of the stack."""
        await self.redis.aclose()
        for client in (self.buffer, self.sync):
            await client.close()

    async def submit(self, tasks: int) -> None:
        """Queues this many tasks."""
        row = {"messages": [{"role": "user", "content": "12+34="}], "answer": "B"}
        new = [
            Task(f"t{next(self._numbers)}", Purpose.SERVE, self._workflow, row)
            for _ in range(tasks)
        ]
        await self.tasks.submit_tasks(new)
        self.submitted += tasks

    async def feed(self) -> None:
        """Keeps tasks queued, as a trainer does; forever."""
        reserve = int(20 * self.options.rate) + 1000
        while True:
            queued = (await self.counts())[TaskState.QUEUED]
            if queued < reserve:
                await self.submit(reserve)
            # The ledger announces no number of queued tasks.
            await asyncio.sleep(1.0)

    async def counts(self) -> dict[TaskState, int]:
        """Tasks by state, now."""
        return (await self.tasks.get_stats()).counts

    async def cpu(self, *services: str) -> dict[str, float]:
        """CPU seconds so far, Redis included."""
        info = await self.redis.info("cpu")
        used = {name: meter.cpu_seconds(self.whole, name) for name in services or SERVICES}
        return {**used, "redis": info["used_cpu_user"] + info["used_cpu_sys"]}

    async def renewals(self) -> meter.Row:
        """What renewing a lease costs: of some that this process holds, nothing else running."""
        await self.submit(RENEWALS)
        held: list[tuple[str, int]] = []
        while len(held) < min(RENEWALS, self.episodes):
            leases, _ = await self.worker.lease_tasks("meter", 500, 5.0)
            held += [(lease.task.task_id, lease.token) for lease in leases]
        before, rounds = await self.cpu("buffer"), 20
        for _ in range(rounds):
            await self.worker.renew_leases("meter", held)
        after = await self.cpu("buffer")
        for start in range(0, len(held), 100):
            await asyncio.gather(
                *(
                    self.worker.return_task(task_id, token, Return(ReturnCause.DRAIN, "measured"))
                    for task_id, token in held[start : start + 100]
                )
            )
        each = 1e6 / (rounds * len(held))
        return {f"renewal_{name}_us": each * (after[name] - before[name]) for name in after}

    async def fill(self) -> meter.Row:
        """Starts the replicas; returns when nearly all episodes run."""
        whole = self.whole
        for index in range(self.options.replicas or max(2, math.ceil(self.episodes / 12_500))):
            address = f"127.0.0.1:{free_port()}"
            whole.service("rollout", address, f"rollout-{index}")
            whole.wait(f"rollout-{index}", address)
        self._empty = await self.memory()
        began = time.perf_counter()
        await self.submit(self.episodes)
        async with asyncio.timeout(900):
            while (running := await self.running()) < 0.99 * self.episodes:
                say(f"{running:.0f} episodes run")
                await asyncio.sleep(min(5.0, self.episodes / 2000))
        return {"fill_s": time.perf_counter() - began}

    async def running(self) -> float:
        """Episodes as the replicas count them; asks each of them."""
        names = meter.processes(self.whole, "rollout")
        gauge = "areal_rollout_running_episodes"
        found = [await asyncio.to_thread(meter.metric, self.whole, name, gauge) for name in names]
        return sum(found)

    async def memory(self) -> meter.Row:
        """Returns the memory of each service, in bytes."""
        held = {name: float(meter.memory(self.whole, name)) for name in ("rollout", "buffer")}
        return {**held, "redis": (await self.redis.info("memory"))["used_memory"]}

    async def held(self) -> meter.Row:
        """Memory per episode in flight, beyond that of the empty stack."""
        full = await self.memory()
        return {f"{n}_kib": (full[n] - self._empty[n]) / 1024 / self.episodes for n in full}

    async def steady(self) -> tuple[meter.Row, dict[str, dict[str, tuple[float, float]]]]:
        """CPU per episode and calls of some seconds in which as many begin as end."""

        async def look() -> tuple[dict[str, float], dict[str, dict[str, tuple[float, float]]]]:
            done = (await self.counts())[TaskState.DELIVERED]
            seen = {n: meter.calls(self.whole, n) for n in ("buffer", "weight_sync")}
            return {**await self.cpu(), "done": done, "time": time.perf_counter()}, seen

        before, calls_before = await look()
        await asyncio.sleep(self.options.seconds)
        after, calls_after = await look()
        done = max(1.0, after["done"] - before["done"])
        row = {f"{n}_us": 1e6 * (after[n] - before[n]) / done for n in (*SERVICES, "redis")}
        row["control_plane_us"] = sum(row.values())
        row["episodes_per_s"] = done / (after["time"] - before["time"])
        names = calls_after
        return row, {n: meter.calls_between(calls_before[n], calls_after[n]) for n in names}

    async def updates(self, count: int) -> meter.Row:
        """New versions, one after the other."""
        fan_outs, spent, whole = [], [], self.whole
        if not self.options.updates:
            return {}
        for version in range(1, self.options.updates + 1):
            path = shutil.copytree(whole.config.model.path, whole.folder / f"version-{version}")
            policy = replace(build_manifest(Path(path), version, 1), path=str(path))
            used, began = await self.cpu(), time.perf_counter()
            await self.sync.publish_version(policy)
            await self.sync.wait_for(
                f"{count} servers at version {version}",
                lambda s, v=version: s.confirmed_version == v and s.confirmed_servers == count,
                timeout=600,
            )
            fan_outs.append(time.perf_counter() - began)
            now = await self.cpu()
            spent.append({name: 1e6 * (now[name] - used[name]) / count for name in now})
            say(f"version {version} everywhere after {fan_outs[-1]:.1f} s")
        return {
            "fan_out_s": statistics.median(fan_outs),
            "paused_s": (await self.sync.status()).update_seconds_mean,
            "weight_sync_us_per_server": statistics.median(s["weight_sync"] for s in spent),
            "rollout_us_per_server": statistics.median(s["rollout"] for s in spent),
        }

    async def drain(self) -> meter.Row:
        """One replica is told to stop."""
        process = self.whole.processes["rollout-0"]
        held = meter.metric(self.whole, "rollout-0", "areal_rollout_running_episodes")
        began = time.perf_counter()
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, 60)
        took = time.perf_counter() - began
        lines = [line for line in process.log.splitlines() if "drain_left_leases" in line]
        left = float(json.loads(lines[0])["leases"]) if lines else 0.0
        row = {"drain_s": took, "drain_held": held, "drain_left": left}
        if len(meter.processes(self.whole, "rollout")) == 1:  # then the ledger itself can say
            row["drain_left"] = (await self.counts())[TaskState.RUNNING]
            leases, _ = await self.worker.lease_tasks("meter", 1000, 5.0)
            row["drain_with_tokens"] = sum(bool(lease.partial) for lease in leases) / len(leases)
        return row


async def simulate(
    count: int, episodes: int, options: argparse.Namespace, folder: Path
) -> tuple[meter.Row, dict[str, dict[str, tuple[float, float]]]]:
    """Simulates one size and returns its figures."""
    with ExitStack() as stack:
        servers = start_servers(stack, count, episodes, options)
        whole = start_services(stack, folder, servers, episodes)
        simulation = Simulation(whole, episodes, options)
        await simulation.sync.wait_for(
            f"{count} servers at version 0", lambda s: s.confirmed_servers == count, timeout=600
        )
        say(f"{count} servers serve")
        row: meter.Row = {"servers": float(count), "episodes": float(episodes)}
        row |= await simulation.renewals()
        feeding = asyncio.create_task(simulation.feed())
        row |= await simulation.fill()
        say("steady")
        row["load_before"] = os.getloadavg()[0]
        figures, calls = await simulation.steady()
        row |= figures
        row |= await simulation.held()
        say(json.dumps({**row, "calls": calls}))
        row |= await simulation.updates(count)
        row["load_after"] = os.getloadavg()[0]
        feeding.cancel()
        for name in ("expired_leases", "extended_leases"):
            row[name] = meter.metric(whole, "buffer", f"areal_buffer_{name}_total")
        known = await simulation.counts()
        alive = (TaskState.QUEUED, TaskState.RUNNING, TaskState.DELIVERED)
        row["lost"] = float(simulation.submitted - sum(known[state] for state in alive))
        row |= await simulation.drain()
        await simulation.close()
        for name in meter.processes(whole, "rollout"):
            whole.processes[name].kill()
    return {key: round(value, 3) for key, value in row.items()}, calls


def size(text: str) -> tuple[int, int]:
    """`1000x50000` as (servers, episodes)."""
    servers, _, episodes = text.partition("x")
    return int(servers), int(episodes)


def main() -> int:
    """Prints the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    default = [(10, 2000), (100, 2000), (1000, 2000)]
    parser.add_argument("sizes", type=size, nargs="*", default=default, help="SERVERSxEPISODES")
    parser.add_argument("--replicas", type=int, default=0, help="rollout processes; 0: as needed")
    parser.add_argument("--rate", type=float, default=60.0, help="episodes that end per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of steady state")
    parser.add_argument("--updates", type=int, default=3)
    options = parser.parse_args()
    rows, calls = [], {}
    for count, episodes in options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            row, answered = asyncio.run(simulate(count, episodes, options, Path(folder)))
        rows.append(row)
        calls[f"{count}x{episodes}"] = answered
        print(json.dumps(row), file=sys.stderr, flush=True)
    print(meter.table(rows))
    grows = {by: meter.growth(rows, by) for by in ("servers", "episodes")}
    # The fan-out is linear in the servers: each takes its own update. Nothing may be worse.
    costs = {f"{k} by {by}": v for by in grows for k, v in grows[by].items() if k[-2:] != "_s"}
    met = max(costs.values(), default=1.0) < QUADRATIC
    print(json.dumps({"bench": "scale", "rows": rows, "growth": grows, "calls": calls, "met": met}))
    return 1 if any(row["lost"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())

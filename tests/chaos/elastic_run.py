"""A training whose inference servers come, go and die: done, watched, and its books checked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
from tests.chaos.books import Check, check_books, read_ledger, read_lines
from tests.chaos.witness import Witness
from tests.integration.stack_tools import RunningStack, areal, areal_background, eventually

from areal.clients.rollout import RolloutClient
from areal.clients.weight_sync import WeightSyncClient
from areal.errors import ArealError
from areal.weights.servers import ServerState

ROOT = Path(__file__).resolve().parents[2]
BATCH, PROBLEMS, ETA = 32, 1000, 2
KILL = "kill"
MODEL = "runs/models/elastic"
_TOKENS = re.compile(r"^sglang:generation_tokens_total\{\S*\s+(\S+)", re.MULTILINE)
_INTERRUPTIONS = re.compile(
    r'^areal_rollout_interruptions_total\{kind="(\w+)"\} (\S+)', re.MULTILINE
)


@dataclass(frozen=True)
class Plan:
    """What happens to which training."""

    trial: str
    steps: int
    actions: tuple[tuple[int, int | str], ...] = ()
    """At which step: scale to so many, or KILL one."""
    seed: int = 0
    arguments: tuple[str, ...] = ()
    ready_s: float = 300.0
    """For the whole stack, and for each newcomer."""
    tolerance: float = 1e-3
    """Of a logprob, between the server's arithmetic and the reference's."""


@dataclass
class Run:
    """One training, and what was seen of it."""

    stack: RunningStack
    wall_s: float = 0.0
    """From the first step's end to the last's."""
    happened: list[str] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    tokens: dict[str, float] = field(default_factory=dict)
    """The most that each server, by url, was seen to have generated in one life."""
    joined: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Each time a server, by url, began to serve: its version, and the current one."""
    interruptions: dict[str, float] = field(default_factory=dict)
    """Of requests, by kind, as the rollout worker counts them."""
    starting_cpu_s: float = 0.0
    """What servers that came during training had used of the CPU when they began to serve."""
    _serving: list[int] = field(default_factory=list)
    _killed: dict[str, float] = field(default_factory=dict)
    """When, by url."""

    @property
    def servers(self) -> float:
        """Serving, averaged over the time of training."""
        return sum(self._serving) / max(1, len(self._serving))

    def steps(self) -> int:
        """Finished ones."""
        file = self.stack.run_dir / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    async def watch(self, plan: Plan, ended: asyncio.Event) -> None:
        """Looks at the servers, several times a second."""
        security = self.stack.security
        client = WeightSyncClient(self.stack.address("weight-sync"), security)
        before: set[str] = set()
        try:
            async with aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=5.0), headers=security.headers()
            ) as http:
                while not ended.is_set():
                    # At the very end weight-sync goes.
                    with contextlib.suppress(ArealError):
                        servers, current = await client.list_servers()
                        serving = {
                            s.url: s.version for s in servers if s.state is ServerState.SERVING
                        }
                        for url in before - serving.keys():
                            self._note(url, "is known to be away")
                        for url in serving.keys() - before:
                            self._note(url, "serves again")
                            self.joined.setdefault(url, []).append((serving[url], current))
                            if self.steps():
                                self.starting_cpu_s += self._cpu_of(url)
                        before = set(serving)
                        if self.steps():
                            self._serving.append(len(serving))
                        await asyncio.gather(*(self._count(http, url) for url in serving))
                        # Not those of the stop, which ends every server under its requests.
                        if self.steps() < plan.steps:
                            await self._count_interruptions(http)
                    await asyncio.sleep(0.2)
        finally:
            await client.close()

    def _cpu_of(self, url: str) -> float:
        for name, process in self.stack.content["processes"].items():
            if name.startswith("inference") and url == f"http://{self.stack.address(name)}":
                with contextlib.suppress(psutil.NoSuchProcess):
                    spent = psutil.Process(process["pid"]).cpu_times()
                    return float(spent.user + spent.system)
        return 0.0

    def _note(self, url: str, what: str) -> None:
        if at := self._killed.get(url):
            after = time.monotonic() - at
            self.happened.append(f"step {self.steps()}: {url} {what}, {after:.1f} s after the kill")

    async def _count(self, http: aiohttp.ClientSession, url: str) -> None:
        if found := _TOKENS.findall(await _metrics(http, url)):
            self.tokens[url] = max(sum(map(float, found)), self.tokens.get(url, 0.0))

    async def _count_interruptions(self, http: aiohttp.ClientSession) -> None:
        url = f"http://{self.stack.process('rollout-0')['metrics']}"
        for kind, count in _INTERRUPTIONS.findall(await _metrics(http, url)):
            self.interruptions[kind] = float(count)

    async def ask(
        self, witness: Witness, client: RolloutClient, plan: Plan, ended: asyncio.Event
    ) -> None:
        """Lets the witness ask, but not so late that the run ends before it has its answers."""
        stop = asyncio.Event()
        asking = asyncio.create_task(witness.ask(client, stop))
        while self.steps() < plan.steps * 9 // 10 and not ended.is_set():  # noqa: ASYNC110
            await asyncio.sleep(0.2)
        stop.set()
        await asking

    async def act(self, plan: Plan, ended: asyncio.Event) -> None:
        """Scales and kills when the plan says so."""
        rng = random.Random(plan.seed)
        for step, action in plan.actions:
            # A file cannot tell that it has grown.
            while self.steps() < step and not ended.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            at = self.steps()
            if ended.is_set() or at >= plan.steps:
                self.checks.append(Check(f"{action} before the end", False, f"step {at}"))
                return
            if action == KILL:
                await self._kill(at, rng)
                continue
            began = time.monotonic()
            done = await asyncio.to_thread(
                areal, "scale", f"inference={action}", "--run", str(self.stack.run_dir),
                cwd=ROOT, timeout=plan.ready_s + 100.0,
            )  # fmt: skip
            said = (done.stdout + done.stderr).strip().splitlines()[-1:]
            self.happened.append(
                f"step {at}: scale to {action}, {time.monotonic() - began:.1f} s: {said}"
            )
            self.checks.append(Check(f"scale to {action}", done.returncode == 0, str(said)))

    async def _kill(self, at: int, rng: random.Random) -> None:
        """One that is busy, so that somebody's request ends with it."""
        processes = self.stack.content["processes"]
        up = [n for n, p in processes.items() if n.startswith("inference") and p["state"] == "up"]
        name = rng.choice(sorted(up))
        url = f"http://{self.stack.address(name)}/v1/loads"
        async with aiohttp.ClientSession(headers=self.stack.security.headers()) as http:
            async with asyncio.timeout(60.0):
                running = 0
                while not running:
                    async with http.get(url) as reply:
                        running = (await reply.json())["loads"][0]["num_running_reqs"]
        os.kill(processes[name]["pid"], signal.SIGKILL)
        self._killed[f"http://{self.stack.address(name)}"] = time.monotonic()
        self.happened.append(f"step {at}: kill -9 {name}")

    def check(self, plan: Plan, scratch: Path) -> None:
        """What must hold of every such run."""
        rows = read_lines(self.stack.run_dir / "metrics.jsonl")
        self.wall_s = rows[-1]["time"] - rows[0]["time"]
        ledger = read_ledger(self.stack.run_dir, f"elastic/{plan.trial}", scratch)
        self.checks += check_books(
            ledger, self.stack.run_dir, steps=plan.steps, batch=BATCH, problems=PROBLEMS, eta=ETA
        )
        dead = ledger.counts.get("all:dead_lettered", 0)
        self.checks.append(Check("no task is dead-lettered", dead == 0, str(dead)))
        # Scored again by the weights of the version that its tokens name: the same probabilities.
        fresh = [r for r in rows if r["staleness/max"] == 0]
        off = max((abs(r["policy/behavior_weight"] - 1.0) for r in fresh), default=0.0)
        self.checks.append(
            Check(
                "fresh tokens carry their version", off < 0.01, f"{off:.4f} in {len(fresh)} steps"
            )
        )

    def report(self) -> None:
        """For those who read along."""
        for line in self.happened:
            print(f"  {line}")
        for check in self.checks:
            print(f"  {'ok  ' if check.holds else 'FAIL'} {check.name}: {check.detail}")
        print(f"  {self.wall_s:.1f} s of training, {self.servers:.2f} servers on average")
        print(f"  requests interrupted while training, by cause: {self.interruptions}")

    def broken(self) -> str:
        """What does not hold; empty: all does."""
        return "; ".join(
            f"{check.name}: {check.detail}" for check in self.checks if not check.holds
        )


async def _metrics(http: aiohttp.ClientSession, url: str) -> str:
    """Empty when there is no answer."""
    try:
        async with http.get(f"{url}/metrics") as reply:
            return await reply.text()
    except (aiohttp.ClientError, TimeoutError):
        return ""


def train(plan: Plan, scratch: Path) -> Run:
    """Trains the arithmetic recipe to the end while the plan's actions happen."""
    stack = RunningStack(ROOT / "runs" / "elastic" / plan.trial)
    shutil.rmtree(stack.run_dir, ignore_errors=True)
    stack.run_dir.mkdir(parents=True)
    run = Run(stack)
    witness = Witness(stack.run_dir, ROOT / MODEL, scratch / "versions")
    launcher = areal_background(
        "run", "--json", *_arguments(plan), cwd=ROOT, log=stack.run_dir / "out.jsonl"
    )

    async def watch() -> None:
        ended = asyncio.Event()
        client = RolloutClient(stack.address("rollout-0"), stack.security)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(run.watch(plan, ended))
                group.create_task(run.act(plan, ended))
                group.create_task(witness.keep_versions(ended))
                group.create_task(run.ask(witness, client, plan, ended))
                await asyncio.to_thread(launcher.wait)
                ended.set()
        finally:
            await client.close()

    try:
        eventually(lambda: stack.content, "stack.json is there", 60.0)
        stack.wait_ready(plan.ready_s + 100.0)
        asyncio.run(watch())
        left = [f"{p.pid} {p.name()}" for p in stack.processes()]
    finally:
        if launcher.poll() is None:
            launcher.kill()
            launcher.wait(10.0)
        stack.clean_up()
    run.checks.append(Check("exit code 0", launcher.returncode == 0, str(launcher.returncode)))
    run.checks.append(Check("no process is left behind", not left, ", ".join(left)))
    run.check(plan, scratch)
    run.checks.append(witness.check(plan.tolerance))
    return run


def _arguments(plan: Plan) -> list[str]:
    settings: Mapping[str, object] = {
        "experiment_name": "elastic",
        "trial_name": plan.trial,
        "model.path": MODEL,
        "allocation_mode": "sglang:d2+fsdp:d1",
        "total_train_steps": plan.steps,
        "train_dataset.batch_size": BATCH,
        "train_problems": PROBLEMS,
        "heldout_problems": 50,
        "rollout.max_head_offpolicyness": ETA,
        "rollout.max_concurrent_rollouts": 128,
        "checkpoint.freq_steps": 20,
        "rollout.setup_timeout_s": plan.ready_s,
    }
    return [
        str(ROOT / "examples" / "arithmetic_grpo.py"),
        *(f"{key}={value}" for key, value in settings.items()),
        *plan.arguments,
    ]

"""What a session's chat call costs beyond the engine: CPU of each process on its way.

    python tools/bench/sessions.py [--agents 8] [--turns 6] [--rounds 5]

Contenders take turns, in front of the same CPU engine with a tiny model, with the same
conversations (`turns` calls each, `agents` of them at once):

    sessions   agent ──> gateway ──> rollout worker ──> engine
                                        └──> buffer ──> Redis
    relay      agent ──> FastAPI + httpx ──> engine

A session records every call, token by token; the relay records nothing. The figures are CPU
milliseconds per call (user and system) of each process, as medians over the rounds, minus what the
process uses when it is idle. Opening and ending the sessions is included. The gateway's own CPU is
expected to be below 2 ms. A table, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "services"))

from tests.integration.gateway_agents import agents_stack
from tests.ports import free_port
from tests.redis_server import RedisServer

EXPECTED_MS = 2.0
IDLE_S = 5.0
WORDS = "What is 12 and 34, and why is it not the answer that you gave before? "


class Cpu:
    """CPU seconds of named processes, with their children."""

    def __init__(self, processes: dict[str, int]) -> None:
        self._processes = {name: psutil.Process(pid) for name, pid in processes.items()}
        self._idle = dict.fromkeys(processes, 0.0)

    def now(self) -> dict[str, float]:
        """Returns the CPU seconds so far."""
        used = {}
        for name, process in self._processes.items():
            family = [process, *process.children(recursive=True)]
            times = [each.cpu_times() for each in family]
            used[name] = sum(each.user + each.system for each in times)
        return used

    async def rest(self) -> None:
        """Learns what the processes use when no one asks them."""
        before = self.now()
        await asyncio.sleep(IDLE_S)
        self._idle = {name: (used - before[name]) / IDLE_S for name, used in self.now().items()}

    def since(self, before: dict[str, float], wall_s: float, calls: int) -> dict[str, float]:
        """Milliseconds of each process for one of `calls`."""
        return {
            name: max(0.0, used - before[name] - self._idle[name] * wall_s) / calls * 1000
            for name, used in self.now().items()
        }


async def converse(http: aiohttp.ClientSession, url: str, key: str, turns: int) -> None:
    """Makes the calls of one conversation."""
    messages: list[dict[str, Any]] = []
    headers = {"Authorization": f"Bearer {key}"}
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{turn}: {WORDS}"})
        body = {"model": "any", "messages": messages, "max_tokens": 8}
        async with http.post(f"{url}/chat/completions", json=body, headers=headers) as reply:
            if reply.status != 200:
                raise SystemExit(f"sessions: {url}: {reply.status} {await reply.text()}")
            answer = await reply.json()
        said = answer["choices"][0]["message"]["content"] or ""
        messages.append({"role": "assistant", "content": said})


async def session(http: aiohttp.ClientSession, url: str, turns: int) -> None:
    """A conversation in a session of its own, which is recorded and ends with a reward."""
    async with http.post(f"{url}/v1/sessions", json={"purpose": "serve"}) as reply:
        opened = await reply.json()
    await converse(http, opened["base_url"], opened["api_key"], turns)
    headers = {"Authorization": f"Bearer {opened['api_key']}"}
    end = f"{url}/sessions/{opened['id']}/end"
    async with http.post(end, json={"reward": 1.0}, headers=headers) as reply:
        if reply.status != 200:
            raise SystemExit(f"sessions: {end}: {reply.status} {await reply.text()}")


async def one_round(name: str, url: str, agents: int, turns: int) -> float:
    """All conversations at once; returns wall seconds."""
    start = time.monotonic()
    timeout = aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(timeout=timeout) as http:

        def one() -> Coroutine[Any, Any, None]:
            if name == "sessions":
                return session(http, url, turns)
            return converse(http, f"{url}/v1", "any", turns)

        await asyncio.gather(*(one() for _ in range(agents)))
    return time.monotonic() - start


@contextmanager
def serving(command: list[str], port: int, log: Path) -> Iterator[int]:
    """A peer that listens on a port; yields its pid."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream, env=env)
    try:
        deadline = time.monotonic() + 300
        while not any(c.laddr.port == port for c in psutil.Process(process.pid).net_connections()):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"sessions: {command[0]}: {log.read_text()[-2000:]}")
            time.sleep(0.2)
        yield process.pid
    finally:
        process.terminate()
        process.wait(60)


async def measure(
    contenders: dict[str, str], cpu: dict[str, Cpu], agents: int, turns: int, rounds: int
) -> dict[str, list[dict[str, float]]]:
    """Alternates the contenders after a round of each to warm up."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
    for each in cpu.values():
        await each.rest()
    for number in range(rounds + 1):
        names = list(contenders) if number % 2 else list(contenders)[::-1]
        for name in names:
            before = cpu[name].now()
            wall_s = await one_round(name, contenders[name], agents, turns)
            used = cpu[name].since(before, wall_s, agents * turns)
            if number:
                found[name].append(used)
                shown = {key: round(value, 2) for key, value in used.items()}
                print(f"{name:10s} {shown}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    """Prints the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        redis = RedisServer(folder / "redis")
        redis.start()
        stack.callback(redis.kill)
        whole, urls = stack.enter_context(
            agents_stack(folder / "stack", 1, servers=1, redis=redis.url)
        )
        engine = whole.config.endpoints.inference[0]
        pids = {name: whole.processes[name].pid for name in ("rollout", "buffer")}
        engine_pid = whole.processes["inference-0"].pid
        pids = {"gateway": whole.processes["gateway-0"].pid, **pids, "redis": redis.pid}
        contenders, cpu = {"sessions": urls[0]}, {"sessions": Cpu({**pids, "engine": engine_pid})}
        port = free_port()
        relay = str(Path(__file__).parent / "peers" / "http_relay.py")
        command = [sys.executable, relay, engine, str(port)]
        pid = stack.enter_context(serving(command, port, folder / "relay.log"))
        contenders["relay"] = f"http://127.0.0.1:{port}"
        cpu["relay"] = Cpu({"relay": pid, "engine": engine_pid})
        found = asyncio.run(
            measure(contenders, cpu, arguments.agents, arguments.turns, arguments.rounds)
        )
    medians = {
        name: {key: round(statistics.median(each[key] for each in rounds), 2) for key in rounds[0]}
        for name, rounds in found.items()
    }
    print("CPU ms a call, by process")
    for name, row in medians.items():
        beyond = sum(value for key, value in row.items() if key != "engine")
        parts = ", ".join(f"{key} {value:.2f}" for key, value in row.items())
        print(f"{name:10s} {beyond:6.2f} beyond the engine: {parts}")
    hop = medians["sessions"]["gateway"]
    print(f"the gateway's hop: {hop:.2f} ms, expected below {EXPECTED_MS:g} ms")
    print(
        json.dumps(
            {
                "bench": "sessions",
                "gateway_ms": hop,
                "expected_ms": EXPECTED_MS,
                "load": round(os.getloadavg()[0], 1),
                **medians,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

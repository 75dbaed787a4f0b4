r"""CPU time of a rollout worker: per episode, and per generation request.

    python tools/bench/rollout.py            # a table, then one JSON line
    python -m venv PEER && PEER/bin/pip install --no-deps areal==1.0.4 && PEER/bin/pip install \
        torch==2.13.0 torchdata==0.11.0 transformers==5.23.0 aiofiles==25.1.0 aiohttp==3.14.5 \
        colorlog==6.12.0 einops==0.8.2 flask==3.1.3 httpx==0.28.1 hydra-core==1.3.8 lark==1.3.1 \
        numba==0.68.1 openai==3.54.0 orjson==3.13.0 pillow==13.0.0 psutil==7.2.2 pydantic==2.14.3 \
        pyyaml==6.0.3 ray==2.60.0 requests==2.34.2 tenacity==9.2.1 uvloop==0.23.0
    python tools/bench/rollout.py --areal PEER/bin/python

Episodes: the real executor runs between an in-memory ledger and a workflow that waits. It is
compared with a bare asyncio pool, which only starts and awaits the same number of tasks, and with
AReaL's WorkflowExecutor over an engine that does nothing. The targets are half of AReaL's CPU with
64 episodes at once, and a quarter from 1024 on. Requests: the real generation client, tokenizer and
RLVR workflow run in the executor, with HTTP to a separate process that answers four tokens after a
delay; scoring is in memory. Times are CPU of the measured process only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import uvloop

sys.path.insert(0, str(Path(__file__).parents[2] / "services"))

from peers.process import Peer
from prometheus_client import CollectorRegistry

from areal.protocol.leases import Lease
from areal.tokenizer import Tokenizer
from areal.types import (
    GenerationHyperparameters,
    LLMResponse,
    Purpose,
    StopReason,
    Task,
    TrajectoryGroup,
    WorkflowSpec,
)
from areal.weights.servers import InferenceServer, ServerState
from areal.workflows.base import RolloutWorkflow, make_trajectory
from areal.workflows.rlvr import RLVRWorkflow
from areal_rollout.config import RolloutConfig
from areal_rollout.executor import Executor
from areal_rollout.generation.client import SGLangClient
from areal_rollout.generation.protocol import ModelLimits
from areal_rollout.generation.server_table import ServerTable
from areal_rollout.metrics import RolloutMetrics
from areal_torch.models.tiny import CHAT_TEMPLATE, END_ID, VOCAB_SIZE, make_byte_tokenizer


class _Ledger:
    """Hands out so many leases as fast as they are asked for."""

    def __init__(self, count: int, data: dict[str, Any]) -> None:
        spec = WorkflowSpec("w")
        self._leases = [
            Lease(Task(f"t{i}", Purpose.TRAIN, spec, data), i + 1, 0, 30.0) for i in range(count)
        ]
        self._left = count
        self.completed = asyncio.Event()

    async def lease_tasks(
        self, worker_id: str, most: int, wait: float, **_: Any
    ) -> tuple[list[Lease], str]:
        if not self._leases:
            await asyncio.sleep(wait)
            return [], "queue empty"
        await asyncio.sleep(0)
        taken, self._leases = self._leases[:most], self._leases[most:]
        return taken, ""

    async def renew_leases(self, worker_id: str, leases: Any) -> set[str]:
        return set()

    async def complete_task(self, task_id: str, token: int, group: Any, worker_id: str) -> bool:
        self._left -= 1
        if not self._left:
            self.completed.set()
        return True

    async def reject_task(
        self, task_id: str, token: int, reason: str, group: TrajectoryGroup | None
    ) -> None:
        raise AssertionError(reason)

    async def return_task(self, task_id: str, token: int, end: Any) -> None:
        raise AssertionError(end)


class _NoGeneration:
    async def wait_ready(self, timeout: float) -> bool:
        return True

    async def generate(self, *_: Any, **__: Any) -> None:
        raise AssertionError

    async def interrupt(self, timeout: float) -> None:
        return


class _Scorer:
    async def score(self, name: str, digest: str, kwargs: Any, items: list[Any]) -> list[float]:
        return [1.0] * len(items)


async def _no_session(lease: Lease) -> TrajectoryGroup:
    raise AssertionError(lease)


class _Workflows:
    def __init__(self, workflow: RolloutWorkflow) -> None:
        self._workflow = workflow

    async def get(self, spec: WorkflowSpec) -> RolloutWorkflow:
        return self._workflow


class _Waiting(RolloutWorkflow):
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        answer = LLMResponse([1, 2, 3], [4, 5], [-0.1, -0.2], [0, 0], StopReason.STOP)
        self.trajectory = make_trajectory(answer, 1.0)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        await asyncio.sleep(self.seconds)
        return self.trajectory


def tokenizer() -> Tokenizer:
    return Tokenizer(make_byte_tokenizer(), chat_template=CHAT_TEMPLATE, eos_token_ids=[END_ID])


async def run_executor(
    ledger: _Ledger, workflow: RolloutWorkflow, generation: Any, capacity: int
) -> tuple[float, float]:
    """(CPU seconds, wall seconds) until every task is completed."""
    metrics = RolloutMetrics(CollectorRegistry())
    executor = Executor(
        RolloutConfig(worker_id="w", capacity=capacity, max_leases=256),
        buffer=ledger,
        generation=generation,
        scorer=_Scorer(),
        workflows=_Workflows(workflow),
        tokenizer=tokenizer(),
        observer=metrics,
        session_group=_no_session,
    )
    cpu, wall = time.process_time(), time.perf_counter()
    tasks = [asyncio.create_task(executor.run()), asyncio.create_task(executor.keep_leases())]
    await asyncio.wait_for(ledger.completed.wait(), 300)
    cost = time.process_time() - cpu, time.perf_counter() - wall
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return cost


async def run_pool(count: int, seconds: float, capacity: int) -> tuple[float, float]:
    """The bound: a semaphore's worth of tasks, nothing else."""
    room = asyncio.Semaphore(capacity)

    async def one() -> None:
        await asyncio.sleep(seconds)
        room.release()

    cpu, wall = time.process_time(), time.perf_counter()
    tasks = set()
    for _ in range(count):
        await room.acquire()
        task = asyncio.create_task(one())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    for _ in range(capacity):
        await room.acquire()
    return time.process_time() - cpu, time.perf_counter() - wall


async def routing_us(count: int) -> float:
    """CPU microseconds to choose one of so many servers for a request of a group of eight."""
    table = ServerTable()
    table.update(
        [InferenceServer(f"s{i}", f"http://s{i}", ServerState.SERVING, 0) for i in range(count)]
    )
    began = time.process_time()
    for number in range(20_000):
        server = table.choose(0, f"g{number // 8}", 600)
        assert server is not None
        server.outstanding += 600
    return (time.process_time() - began) / 20_000 * 1e6


async def run_requests(port: int, groups: int, samples: int, concurrent: int) -> float:
    """CPU seconds for so many groups over HTTP."""
    table = ServerTable()
    metrics = RolloutMetrics(CollectorRegistry())

    async def report(url: str, cause: str) -> None:
        raise AssertionError(f"{url}: {cause}")

    client = SGLangClient(
        table,
        ModelLimits(VOCAB_SIZE, 2048, (END_ID,)),
        report=report,
        observer=metrics,
        request_timeout_s=60,
        setup_timeout_s=10,
    )
    await client.start()
    table.update([InferenceServer("a", f"http://127.0.0.1:{port}", ServerState.SERVING, 0)])
    workflow = RLVRWorkflow("math", GenerationHyperparameters(n_samples=samples, max_new_tokens=8))
    data = {"messages": [{"role": "user", "content": "12+34="}], "answer": "46"}
    cpu, _ = await run_executor(_Ledger(groups, data), workflow, client, concurrent)
    await client.close()
    return cpu


ANSWER = json.dumps(
    {
        "output_ids": [52, 54, 70, END_ID],
        "text": "46",
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": END_ID},
            "weight_version": "0",
            "weight_versions": [{"version": "0", "start": 0, "end": 4}],
            "output_token_logprobs": [
                [-0.12345678, 52, None],
                [-0.2345678, 54, None],
                [-0.1, 70, None],
                [-1.5, END_ID, None],
            ],
        },
    }
).encode()

SAMPLES = 8


class _Answering(asyncio.Protocol):
    """The smallest HTTP server: four tokens, 20 ms after each request."""

    def connection_made(self, transport: Any) -> None:
        self.transport, self.buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self.buffer += data
        head, separator, rest = self.buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
        if len(rest) < length:
            return
        self.buffer = rest[length:]
        answer = ANSWER
        if b'"input_ids":[[' in rest[:length]:
            answer = b"[" + b",".join([ANSWER] * SAMPLES) + b"]"
        reply = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer
        asyncio.get_running_loop().call_later(0.02, self.transport.write, reply)


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(_Answering, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def measure(repeats: int, port: int, peer: Peer | None) -> dict[str, Any]:
    cases = [(64, 0.0, 6400), (1024, 0.5, 8192), (4096, 1.0, 16384)]
    result: dict[str, Any] = {"bench": "rollout", "load": round(os.getloadavg()[0], 1)}
    print(
        f"{'CPU µs per episode':28}{'ours':>8}{'bare pool':>12}{'ours / it':>11}"
        f"{'AReaL':>8}{'ours / it':>11}{'target':>8}"
    )
    for concurrent, seconds, count in cases:
        ours, pool, areal = [], [], []
        for number in range(repeats):
            for mine in (True, False) if number % 2 else (False, True):
                if mine:
                    ledger = _Ledger(count, {})
                    cpu, _ = await run_executor(
                        ledger, _Waiting(seconds), _NoGeneration(), concurrent
                    )
                else:
                    cpu, _ = await run_pool(count, seconds, concurrent)
                (ours if mine else pool).append(cpu / count * 1e6)
            if peer is not None:
                spent = peer.ask(concurrent=concurrent, seconds=seconds, count=count)
                areal.append(spent / count * 1e6)
        name = f"{concurrent} concurrent, {seconds:g} s each"
        cost, bound = statistics.median(ours), statistics.median(pool)
        row = {"ours_us": cost, "pool_us": bound, "ratio": cost / bound}
        cells = f"{cost:8.1f}{bound:12.1f}{cost / bound:11.2f}"
        if areal:
            theirs = statistics.median(areal)
            row |= {"areal_us": theirs, "areal_ratio": cost / theirs}
            target = 0.5 if concurrent < 1024 else 0.25
            cells += f"{theirs:8.1f}{cost / theirs:11.2f}{target:8.2f}"
        result[name] = {key: round(value, 2) for key, value in row.items()}
        print(f"{name:28}{cells}", flush=True)
    if peer is None:
        print("AReaL's WorkflowExecutor: not run, no --areal PYTHON was given (see --help)")
    chosen = {}
    for size in (10, 100, 1000):
        costs = [await routing_us(size) for _ in range(5)]
        chosen[size] = round(statistics.median(costs), 2)
    result["routing_us"] = chosen
    print(f"routing a request among 10, 100, 1000 servers: {list(chosen.values())} µs CPU")
    groups = 512
    await run_requests(port, 64, SAMPLES, 64)
    costs = [await run_requests(port, groups, SAMPLES, 64) for _ in range(repeats)]
    episode = statistics.median(costs) / groups * 1e6
    result["rlvr"] = {"group_us": round(episode, 1), "request_us": round(episode / SAMPLES, 1)}
    print(f"RLVR, {SAMPLES} samples, 64 groups at once: {episode:.0f} µs CPU per group,")
    print(f"    {episode / SAMPLES:.0f} µs per sample (request, decode, score in memory, arrays)")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--areal", metavar="PYTHON", default="")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        uvloop.run(serve())
        return
    peer = Peer(arguments.areal, "areal_executor.py").ready() if arguments.areal else None
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        print(json.dumps(uvloop.run(measure(arguments.repeats, port, peer))))
    finally:
        server.kill()
        server.wait()
        if peer is not None:
            peer.close()


if __name__ == "__main__":
    main()

"""What a weight update costs generation: standstill, lost tokens, aborted requests.

    python tools/bench/standstill.py [--sglang] [--requests 64] [--every 0.5] [--hidden 128]

The real coordinator updates a real areal_inference server (or SGLang's, from `make sglang`) every
`--every` seconds, during `--requests` requests of the real generation client. Modes alternate, and
the bench prints for each: the share of time in which the server stood still, the standstill per
update, the requests that it aborted, the duration of the trainer's publish call, and tokens/s
compared with a run without updates. These tokens/s include the CPU for reading the weights. The
standstill is measured by areal_inference itself. For SGLang, it lasts from the request to pause to
the answer to the request to continue. A table, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[2] / "services"))

from tests.contract.engines import running_sglang
from tests.inference_server import running_server
from tests.unit.areal_weight_sync.weight_sync_fakes import FakeStore

from areal.types import GenerationHyperparameters, LLMRequest, LLMResponse, StopReason
from areal.weights.manifest import PolicyVersion, build_manifest
from areal_rollout.generation.client import SGLangClient
from areal_rollout.generation.protocol import ModelLimits
from areal_rollout.generation.server_table import ServerTable
from areal_torch.models.tiny import VOCAB_SIZE, make_tiny_model
from areal_weight_sync.config import WeightSyncConfig
from areal_weight_sync.coordinator import Coordinator
from areal_weight_sync.engine.http import HttpEngine, open_session

MODES = ("none", "in_place", "retract", "abort")
TARGET_PERCENT = 1.0
_COUNTER = re.compile(r"^(\S+?)_total\{\S*\s+(\S+)", re.MULTILINE)


class _Observer:
    def request_done(self, seconds: float, tokens: int) -> None:
        return

    def interruption(self, kind: str) -> None:
        return

    def salvaged(self, tokens: int) -> None:
        return


async def counters(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with http.get(f"{url}/metrics") as reply:
        found = {name: float(value) for name, value in _COUNTER.findall(await reply.text())}
    return {**found, "time": time.perf_counter()}


class _TimedEngine(HttpEngine):
    """Counts the seconds from asking for a pause to the answer that it is over."""

    paused = 0.0
    _since = 0.0

    async def pause(self, mode: str) -> None:
        self._since = time.perf_counter()
        await super().pause(mode)

    async def resume(self) -> None:
        await super().resume()
        if self._since:
            self.paused += time.perf_counter() - self._since
        self._since = 0.0


async def generate(client: SGLangClient, tokens: int) -> None:
    """Requests one after the other, forever."""
    prompt = list(range(5, 25))
    request = LLMRequest(prompt, GenerationHyperparameters(max_new_tokens=tokens))
    while True:
        await client.generate(request, [LLMResponse(list(prompt), [], [], [], StopReason.ABORT)])


async def measure(
    url: str, models: list[Path], mode: str, options: argparse.Namespace
) -> dict[str, float]:
    """One contender for `options.seconds`."""
    tasks: list[asyncio.Task[None]] = []

    def spawn(work: Any, name: str) -> asyncio.Task[None]:
        tasks.append(asyncio.create_task(work, name=name))
        return tasks[-1]

    async def report(where: str, cause: str) -> None:
        print(f"failed: {where}: {cause}", file=sys.stderr)

    table = ServerTable()
    client = SGLangClient(
        table,
        ModelLimits(VOCAB_SIZE, 2048),
        report=report,
        observer=_Observer(),
        request_timeout_s=300.0,
        setup_timeout_s=60.0,
    )
    await client.start()
    engines: list[_TimedEngine] = []
    async with open_session({}) as session, aiohttp.ClientSession() as http:

        def connect(url: str) -> _TimedEngine:
            engines.append(_TimedEngine(url, session))
            return engines[-1]

        coordinator = Coordinator(
            WeightSyncConfig(interrupt="in_place" if mode == "none" else mode),
            FakeStore(),
            connect,
            spawn,
            spawn,
        )
        changes = coordinator.open_feed()

        async def follow() -> None:
            while True:
                await changes.take()
                table.update(coordinator.servers())

        spawn(follow(), "follow")

        async def confirmed(version: int) -> None:
            feed = coordinator.open_feed()
            async with asyncio.timeout(60.0):
                while coordinator.status().confirmed_version < version:
                    await feed.take()
            coordinator.close_feed(feed)

        def versioned(number: int) -> PolicyVersion:
            return build_manifest(models[number % 2], number, 1)

        coordinator.register("s", url)
        await coordinator.publish(versioned(0))
        await confirmed(0)
        for _ in range(options.requests):
            spawn(generate(client, options.tokens), "generate")
        await asyncio.sleep(1.0)
        before, started = await counters(http, url), time.perf_counter()
        paused_before = sum(engine.paused for engine in engines)
        version, blocked = 0, []
        while time.perf_counter() - started < options.seconds:
            # On a grid, so that a slow update does not make itself rarer.
            await asyncio.sleep(options.every)
            if mode != "none":
                version += 1
                policy = versioned(version)
                began = time.perf_counter()
                await coordinator.publish(policy)
                blocked.append(time.perf_counter() - began)
                await confirmed(version)
        after = await counters(http, url)
        gained = {key: value - before.get(key, 0.0) for key, value in after.items()}
        paused = sum(engine.paused for engine in engines) - paused_before
        await coordinator.stop()
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
    await client.close()
    paused = gained.get("areal_inference_pause_seconds", paused)
    return {
        "standstill_percent": 100 * paused / gained["time"],
        "standstill_ms": 1000 * paused / max(1, version),
        "updates": version,
        # SGLang lists it from the first one on.
        "aborted": gained.get("sglang:num_aborted_requests", 0.0),
        "publish_ms": 1000 * statistics.median(blocked) if blocked else 0.0,
        "tokens_per_s": gained["sglang:generation_tokens"] / gained["time"],
    }


async def run(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """Returns the medians by mode."""
    sizes = {"hidden_size": options.hidden, "num_hidden_layers": options.layers}
    sizes["intermediate_size"] = 3 * options.hidden
    models = [make_tiny_model(folder / str(seed), seed=seed, **sizes) for seed in (0, 1)]
    rows: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    flags = ("--max-running-requests", str(options.requests), "--context-length", "2048")
    with ExitStack() as stack:
        if options.sglang:
            url, _ = stack.enter_context(running_sglang(models[0], folder / "log", *flags))
        else:
            url = stack.enter_context(running_server(models[0], *flags)).url
        for _ in range(options.repeat):
            for mode in MODES:
                rows[mode].append(await measure(url, models, mode, options))
    return {
        mode: {key: statistics.median(row[key] for row in found) for key in found[0]}
        for mode, found in rows.items()
    }


def main() -> int:
    """Prints the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--sglang", action="store_true", help="unmodified SGLang, not our engine")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="of each request, at most")
    parser.add_argument("--every", type=float, default=0.5, help="seconds between updates")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = uvloop.run(run(options, Path(folder)))
    print(
        f"{'updates':9s} {'standstill':>10s} {'per update':>11s} {'aborted':>8s} "
        f"{'publish':>9s} {'tokens/s':>9s} {'of none':>8s}"
    )
    quiet = found["none"]["tokens_per_s"]
    for mode, row in found.items():
        row["of_none"] = row["tokens_per_s"] / quiet
        print(
            f"{mode:9s} {row['standstill_percent']:9.2f}% {row['standstill_ms']:8.1f} ms "
            f"{row['aborted']:8.0f} {row['publish_ms']:6.1f} ms {row['tokens_per_s']:9.0f} "
            f"{row['of_none']:8.2f}"
        )
    rounded = {m: {k: round(v, 3) for k, v in row.items()} for m, row in found.items()}
    met = found["in_place"]["standstill_percent"] < TARGET_PERCENT
    print(
        json.dumps(
            {
                "bench": "standstill",
                "engine": "sglang" if options.sglang else "areal_inference",
                "load": round(os.getloadavg()[0], 1),
                "target_percent": TARGET_PERCENT,
                "met": met and not found["in_place"]["aborted"],
                **rounded,
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())

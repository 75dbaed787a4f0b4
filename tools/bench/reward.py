"""Scores per second of our reward service, compared with AReaL's AsyncRewardWrapper.

    pip download areal==1.0.4 --no-deps -d FOLDER
    python tools/bench/reward.py --peer FOLDER/areal-1.0.4-py3-none-any.whl    # a table, then JSON

Both sides have one worker process and score the same items; the table says if their total scores
differ. `trivial` compares two strings. `math` scores answers to numeric problems, half of them
right. The peer uses math-verify, as in its own recipes. Our built-in reward uses math-verify only
if text and numbers do not decide. Contenders alternate, and medians are printed. Ours is measured
through gRPC, from the client to a worker and back. Without --peer, the peer's mechanism is
measured: one `run_in_executor` on a ProcessPoolExecutor per item.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import logging
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
import types
import zipfile
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import grpc

ITEMS = 512
TRIVIAL = b"""
def reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **data):
    return float(completions.strip() == answer)
"""


def items() -> list[dict[str, Any]]:
    """Half right, half wrong; forms of numbers as models write them."""
    forms = ("{}", "{}.", "so it is \\boxed{{{}}}", "2 + 2\n#### {}")
    result = []
    for number in range(ITEMS):
        value = number * 37 % 10_007
        said = value if number % 2 else value + 1
        text = forms[number // 2 % len(forms)].format(said)
        result.append({"completion": text, "answer": str(value)})
    return result


def trivial(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str
) -> float:
    """The peer's copy of TRIVIAL."""
    return float(completions.strip() == answer)


def verified(
    prompt: str, completions: str, prompt_ids: list[int], completion_ids: list[int], answer: str
) -> float:
    """math-verify, as the peer's recipes call it."""
    from math_verify import parse, verify

    gold = parse(f"\\boxed{{{answer}}}", parsing_timeout=None)
    return float(verify(gold, parse(completions, parsing_timeout=None), timeout_seconds=None))


def peer_class(path: Path | None) -> Callable[..., Callable[..., Awaitable[float]]]:
    """AsyncRewardWrapper out of a wheel or a source tree; its package itself needs torch."""
    if path is None:

        def same_mechanism(function: Callable[..., float]) -> Callable[..., Awaitable[float]]:
            executor = ProcessPoolExecutor(1, multiprocessing.get_context("fork"))

            async def call(*args: Any, **kwargs: Any) -> float:
                loop = asyncio.get_running_loop()
                future = loop.run_in_executor(executor, partial(function, *args, **kwargs))
                return await asyncio.wait_for(future, 15)

            return call

        return same_mechanism
    name = "areal/api/reward_api.py"
    if path.is_file():
        with zipfile.ZipFile(path) as wheel:
            source = wheel.read(name)
    else:
        source = (path / name).read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "reward_api.py"
        file.write_bytes(source)
        # Its one import from its own package is a logger.
        sys.modules["areal"] = types.ModuleType("areal")
        utils = types.ModuleType("areal.utils")
        utils.logging = logging  # type: ignore[attr-defined]
        sys.modules["areal.utils"] = utils
        spec = importlib.util.spec_from_file_location("peer_reward_api", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return partial(module.AsyncRewardWrapper, max_workers=1)


async def run_peer(path: Path | None, case: str, seconds: float) -> dict[str, float]:
    """Rate and score of the peer."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    score = peer_class(path)(trivial if case == "trivial" else verified)
    rows = items()

    async def batch() -> float:
        calls = (score("p", r["completion"], [1] * 20, [2] * 16, r["answer"]) for r in rows)
        return sum(await asyncio.gather(*calls))

    return await measure(batch, seconds)


async def run_ours(case: str, seconds: float) -> dict[str, float]:
    """Rate and score of the service, through gRPC."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "services"))
    import hashlib

    from prometheus_client import CollectorRegistry

    from areal.chassis.waits import Waits
    from areal.clients.reward import RewardClient
    from areal.protocol.scores import ScoreItem
    from areal.v1 import reward_service_pb2_grpc as pb_grpc
    from areal_reward.children import Children
    from areal_reward.config import RewardConfig
    from areal_reward.metrics import RewardMetrics
    from areal_reward.pool import WorkerPool
    from areal_reward.process import WorkerProcess
    from areal_reward.recipes import RecipeCache
    from areal_reward.servicer import RewardService

    async def get_recipe(_: str) -> tuple[str, bytes]:
        return "recipe.py", TRIVIAL

    config = RewardConfig()
    registry = CollectorRegistry()
    children = Children()
    pool = WorkerPool(
        config, lambda: WorkerProcess.start(config, children), RewardMetrics(registry)
    )
    slot = asyncio.create_task(pool.run_slot())
    await pool.wait_ready()
    server = grpc.aio.server()
    pb_grpc.add_RewardServiceServicer_to_server(
        RewardService(pool, RecipeCache(get_recipe), Waits()), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = RewardClient(f"127.0.0.1:{port}")
    digest = hashlib.sha256(TRIVIAL).hexdigest()
    spec = ("reward_fn", digest) if case == "trivial" else ("math", "")
    scored = [
        ScoreItem("p", r["completion"], [1] * 20, [2] * 16, {"answer": r["answer"]})
        for r in items()
    ]

    async def batch() -> float:
        results = await client.score(*spec, {}, scored)
        return sum(r for r in results if isinstance(r, float))

    try:
        return await measure(batch, seconds)
    finally:
        await client.close()
        await server.stop(0)
        slot.cancel()
        await asyncio.gather(slot, return_exceptions=True)


async def measure(batch: Callable[[], Awaitable[float]], seconds: float) -> dict[str, float]:
    """Repeats a batch of ITEMS for some seconds after one to warm up."""
    score = await batch()
    count = 0
    began = time.perf_counter()
    while time.perf_counter() - began < seconds:
        await batch()
        count += ITEMS
    return {"rate": count / (time.perf_counter() - began), "score": score}


def contend(who: str, case: str, peer: Path | None, seconds: float) -> dict[str, float]:
    """One contender in a process of its own."""
    command = [sys.executable, __file__, "--as", who, "--case", case, "--seconds", str(seconds)]
    command += ["--peer", str(peer)] if peer else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"bench reward: {who} {case} failed:\n{done.stderr[-2000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Reads the arguments; runs all or one contender."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", type=Path, help="AReaL's wheel or source tree")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.5, help="per round and contender")
    parser.add_argument("--as", dest="who", choices=["ours", "peer"], help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=["trivial", "math"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.who == "peer":
        print(json.dumps(asyncio.run(run_peer(options.peer, options.case, options.seconds))))
        return
    if options.who == "ours":
        print(json.dumps(asyncio.run(run_ours(options.case, options.seconds))))
        return
    figures: dict[str, Any] = {}
    theirs = "AReaL AsyncRewardWrapper" if options.peer else "ProcessPoolExecutor per item"
    for case in ("trivial", "math"):
        rounds: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
        for number in range(options.rounds):
            for who in ("ours", "peer") if number % 2 else ("peer", "ours"):
                rounds[who].append(contend(who, case, options.peer, options.seconds))
        rates = {who: statistics.median(r["rate"] for r in rows) for who, rows in rounds.items()}
        scores = {who: rows[0]["score"] for who, rows in rounds.items()}
        same = "same score" if scores["ours"] == scores["peer"] else f"SCORES DIFFER {scores}"
        figures[case] = {"ours_per_s": rates["ours"], "peer_per_s": rates["peer"], "score": same}
        print(
            f"reward {case:8} ours {rates['ours']:9,.0f}/s   {theirs} {rates['peer']:7,.0f}/s   "
            f"ratio {rates['ours'] / rates['peer']:.1f} (target >= 2; {same})"
        )
    print(json.dumps({"bench": "reward", "peer": theirs, **figures}))


if __name__ == "__main__":
    main()

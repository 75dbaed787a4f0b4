"""The reward service as a process, its workers, and the client, over real gRPC."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import psutil
import pytest
from prometheus_client import CollectorRegistry
from tests.service_process import ServiceProcess, service_process

from areal.chassis.interceptors import CallInterceptor
from areal.clients.reward import RewardClient
from areal.errors import InvalidInput, NotFound
from areal.protocol.scores import ScoreError, ScoreFailure, ScoreItem
from areal.v1 import buffer_service_pb2, buffer_service_pb2_grpc

RECIPE = b"""
import asyncio, ctypes, os, subprocess, sys, threading, time

def reward_fn(prompt, completions, prompt_ids, completion_ids, answer, **data):
    right = float(completions.strip() == answer)
    return right + 0.001 * len(prompt_ids) + 0.01 * len(completion_ids)

def trouble(completion):
    print("a line of the user's")
    os.write(1, b"raw bytes into descriptor 1\\n")
    if completion == "hang":
        while True: pass
    if completion == "sleep": time.sleep(600)
    if completion == "exit": os._exit(3)
    if completion == "segv": ctypes.string_at(0)
    if completion == "realtime": os.kill(os.getpid(), 37)
    if completion == "memory": bytearray(3 << 30)
    if completion == "raise": raise KeyError("answer")
    if completion == "sys.exit": sys.exit(1)
    if completion == "none": return None
    if completion == "nan": return float("nan")
    if completion == "child": subprocess.Popen(["sleep", "600"]); time.sleep(600)
    return 1.0

async def judge(completion):
    await asyncio.sleep(1.0 if completion == "takes its time" else 0.2)
    if completion == "slow": await asyncio.sleep(600)
    if completion == "block": time.sleep(600)
    if completion == "raise": raise TimeoutError("the judge's own")
    return 0.5

async def stubborn(completion):
    if completion == "fine":
        await asyncio.sleep(0.1)
        return 1.0
    while True:
        try: await asyncio.sleep(0.05)
        except: pass

def whoami(completion): return float(os.getpid())
"""
DIGEST = hashlib.sha256(RECIPE).hexdigest()
BROKEN = b"def reward_fn(:\n"
BROKEN_DIGEST = hashlib.sha256(BROKEN).hexdigest()


class Recipes(buffer_service_pb2_grpc.BufferServiceServicer):
    """The ledger's recipe store."""

    async def GetRecipe(self, request, context):
        known = {DIGEST: RECIPE, BROKEN_DIGEST: BROKEN}
        if request.digest not in known:
            raise NotFound(f"recipe {request.digest[:12]!r}: unknown digest")
        return buffer_service_pb2.GetRecipeResponse(
            file_name="my_recipe.py", source=known[request.digest]
        )


@asynccontextmanager
async def reward_service(folder: Path, *overrides: str) -> AsyncIterator[ServiceProcess]:
    server = grpc.aio.server(interceptors=[CallInterceptor("buffer", CollectorRegistry())])
    buffer_service_pb2_grpc.add_BufferServiceServicer_to_server(Recipes(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    config = f"endpoints:\n  buffer: 127.0.0.1:{port}\n"
    try:
        async with service_process("areal_reward", folder, config, *overrides) as service:
            yield service
    finally:
        await server.stop(0)


@asynccontextmanager
async def reward_client(service: ServiceProcess) -> AsyncIterator[RewardClient]:
    client = RewardClient(service.listen)
    try:
        yield client
    finally:
        await client.close()


def _workers(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


async def _in_work(service: ServiceProcess) -> None:
    """Waits until the service has an item that is not scored yet."""
    async with asyncio.timeout(30), aiohttp.ClientSession() as http:
        while True:
            async with http.get(f"http://{service.metrics}/metrics") as reply:
                if "areal_reward_waiting_items 1.0" in await reply.text():
                    return
            await asyncio.sleep(0.01)


async def _gone(processes: list[psutil.Process], deadline_s: float = 60.0) -> bool:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, deadline_s)
    return not alive


async def test_score_when_batch_is_mixed_then_each_item_gets_its_own_outcome(tmp_path):
    async with (
        reward_service(tmp_path, "reward.timeout_s=1.0", "reward.memory_mb=256") as service,
        reward_client(service) as client,
    ):
        words = [
            *("ok", "hang", "ok", "exit", "raise", "none", "segv", "nan", "ok", "memory"),
            "realtime",
            *("sys.exit", "sleep", "child", "ok"),
        ]
        results = await client.score(
            "trouble", DIGEST, {}, [ScoreItem("p", word) for word in words]
        )
        got = dict(zip(words, results, strict=True))
        expected = {
            "hang": (ScoreError.TIMEOUT, "trouble took longer than reward.timeout_s = 1 s"),
            "sleep": (ScoreError.TIMEOUT, "took longer"),
            "child": (ScoreError.TIMEOUT, "took longer"),
            "exit": (ScoreError.CRASH, "exit code 3"),
            "segv": (ScoreError.CRASH, "signal SIGSEGV"),
            "realtime": (ScoreError.CRASH, "signal 37"),
            "memory": (ScoreError.CRASH, "ran out of memory: reward.memory_mb = 256"),
            "raise": (ScoreError.FUNCTION, "trouble raised KeyError: 'answer' (my_recipe.py:18)"),
            "sys.exit": (ScoreError.FUNCTION, "trouble raised SystemExit"),
            "none": (ScoreError.FUNCTION, "trouble returned None: expected a finite number"),
            "nan": (ScoreError.FUNCTION, "trouble returned nan"),
        }
        for word, (error, text) in expected.items():
            outcome = got[word]
            assert isinstance(outcome, ScoreFailure), word
            assert (outcome.error, text in outcome.message) == (error, True), outcome
        assert [r for w, r in zip(words, results, strict=True) if w == "ok"] == [1.0] * 4
        assert 'raise KeyError("answer")' in got["raise"].traceback
        assert "areal_reward" not in got["raise"].traceback
        # What user code prints is in the log, and has not broken the protocol.
        assert "a line of the user's" in service.text()
        assert "raw bytes into descriptor 1" in service.text()
        # Killed workers took their children along.
        names = [p.name() for p in _workers(service.pid)]
        assert names.count("sleep") == 0
        assert len(names) == 1


async def test_score_when_function_has_the_library_signature_then_values_are_right(tmp_path):
    async with reward_service(tmp_path) as service, reward_client(service) as client:
        data = {"answer": "42", "extra": [1]}
        items = [
            ScoreItem("p", " 42", [1] * 3, [2] * 5, data),
            ScoreItem("p", "41", [1], [], data),
            ScoreItem("p", "41"),
        ]
        *rewards, failed = await client.score("reward_fn", DIGEST, {}, items)
        assert rewards == pytest.approx([1.053, 0.001])
        assert failed.error is ScoreError.INVALID
        assert "needs 'answer'" in failed.message
        assert await client.score("reward_fn", DIGEST, {}, []) == []


async def test_score_when_function_is_async_then_calls_overlap_and_limits_hold(tmp_path):
    async with (
        reward_service(tmp_path, "reward.timeout_s=1.0") as service,
        reward_client(service) as client,
    ):
        began = time.monotonic()
        items = [ScoreItem("p", "x")] * 64
        assert await client.score("judge", DIGEST, {}, items) == [0.5] * 64
        assert time.monotonic() - began < 64 * 0.2, "one after the other takes so long"
        words = ["x", "slow", "raise", "block", "x"]
        results = await client.score("judge", DIGEST, {}, [ScoreItem("p", w) for w in words])
        assert [results[0], results[4]] == [0.5, 0.5]
        assert [r.error for r in results[1:4]] == [
            ScoreError.TIMEOUT,
            ScoreError.FUNCTION,
            ScoreError.TIMEOUT,
        ]
        assert "the judge's own" in results[2].message


async def test_score_when_an_async_call_will_not_be_cancelled_then_its_deadline_holds(tmp_path):
    async with (
        reward_service(tmp_path, "reward.timeout_s=1") as service,
        reward_client(service) as client,
    ):
        items = [ScoreItem("p", word) for word in ("fine", "endless", "fine")]
        for _ in range(2):  # the second time in a worker of its own
            began = time.monotonic()
            first, second, third = await asyncio.wait_for(
                client.score("stubborn", DIGEST, {}, items), 30
            )
            assert (first, third) == (1.0, 1.0)
            assert isinstance(second, ScoreFailure)
            assert second.error is ScoreError.TIMEOUT
            assert "reward.timeout_s = 1 s" in second.message
            print(f"answered after {time.monotonic() - began:.1f} s")
        (fine,) = await asyncio.wait_for(client.score("stubborn", DIGEST, {}, items[:1]), 30)
        assert fine == 1.0


async def test_score_when_builtin_then_no_recipe_is_needed(tmp_path):
    async with (
        reward_service(tmp_path, "reward.timeout_s=1.0") as service,
        reward_client(service) as client,
    ):
        data = {"answer": "42"}
        items = [ScoreItem("p", "\\boxed{\\sqrt{1764}}", data=data), ScoreItem("p", "7", data=data)]
        assert await client.score("math", "", {}, items) == [1.0, 0.0]
        choice = [ScoreItem("p", "The answer is (B)", data={"answer": "B"})]
        assert await client.score("multiple_choice", "", {}, choice) == [1.0]
        # A pattern that backtracks forever holds the interpreter: only a kill helps.
        items = [ScoreItem("p", "aaa"), ScoreItem("p", "a" * 60 + "b"), ScoreItem("p", "b")]
        results = await client.score("regex", "", {"pattern": "^(a+)+$"}, items)
        assert [results[0], results[2]] == [1.0, 0.0]
        # Its time depends on the model's text: that sample scores 0, and the metric counts it.
        assert (results[1], results[1].parts) == (0.0, {"timeouts": 1.0})
        tower = ScoreItem("p", "\\boxed{9^{9^{9^{9}}}}", data={"answer": "16"})
        right = ScoreItem("p", "\\boxed{2^4}", data={"answer": "16"})
        scores = await client.score("math", "", {}, [tower, right, tower, right])
        assert scores == [0.0, 1.0, 0.0, 1.0]
        assert scores[0].parts == scores[2].parts == {"timeouts": 1.0}


WRONG_SPECS = [
    ("maths", "", {}, "did you mean 'math'"),
    ("rewrd_fn", DIGEST, {}, "did you mean 'reward_fn'"),
    ("reward_fn", "0" * 64, {}, "unknown digest"),
    ("regex", "", {"patern": "a"}, "did you mean 'pattern'"),
    ("regex", "", {"pattern": "(a"}, "not a regular expression"),
]
BROKEN_SPEC = ("reward_fn", BROKEN_DIGEST, {}, "recipe my_recipe.py:1")


async def test_score_when_spec_is_wrong_then_items_say_so_and_service_lives(tmp_path):
    async with reward_service(tmp_path) as service, reward_client(service) as client:
        [worker] = _workers(service.pid)
        for name, digest, kwargs, message in (*WRONG_SPECS, BROKEN_SPEC):
            if digest == BROKEN_DIGEST:  # another recipe has a worker of its own
                assert _workers(service.pid) == [worker]
            results = await client.score(name, digest, kwargs, [ScoreItem("p", "c")] * 2)
            assert [r.error for r in results] == [ScoreError.INVALID] * 2, name
            assert message in results[0].message
            assert "\n" not in results[0].message
        with pytest.raises(InvalidInput, match=r"reward\.name ''"):
            await client.score("", "", {}, [ScoreItem("p", "c")])
        [worker] = _workers(service.pid)
        # A worker that dies while idle costs nothing but itself.
        os.kill(worker.pid, signal.SIGKILL)
        assert await client.score("trouble", DIGEST, {}, [ScoreItem("p", "x")]) == [1.0]


async def test_score_when_many_call_at_once_then_all_workers_share_and_stay_small(tmp_path):
    async with (
        reward_service(tmp_path, "reward.workers=2") as service,
        reward_client(service) as client,
    ):
        items = [ScoreItem("p", "x")] * 40
        replies = await asyncio.gather(
            *(client.score("whoami", DIGEST, {}, items) for _ in range(8))
        )
        pids = {int(pid) for reply in replies for pid in reply}
        workers = _workers(service.pid)
        assert pids == {worker.pid for worker in workers}
        assert len(pids) == 2
        assert psutil.Process(service.pid).memory_info().rss < 200 << 20
        assert all(worker.memory_info().rss < 100 << 20 for worker in workers)
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"http://{service.metrics}/metrics") as reply,
        ):
            assert 'areal_reward_items_total{outcome="reward"} 320.0' in await reply.text()


async def test_service_when_terminated_then_accepted_work_is_answered(tmp_path):
    async with reward_service(tmp_path) as service, reward_client(service) as client:
        item = ScoreItem("p", "takes its time")
        call = asyncio.create_task(client.score("judge", DIGEST, {}, [item]))
        await _in_work(service)
        workers = _workers(service.pid)
        assert workers
        assert await service.stop(signal.SIGTERM) == 0
        assert await call == [0.5]
        assert await _gone(workers)


@pytest.mark.parametrize("word", ["x", "hang"])
async def test_service_when_killed_then_no_worker_is_left(tmp_path, word):
    async with (
        reward_service(tmp_path, "reward.timeout_s=60") as service,
        reward_client(service) as client,
    ):
        call = asyncio.create_task(client.score("trouble", DIGEST, {}, [ScoreItem("p", word)]))
        if word == "hang":
            await _in_work(service)
        else:
            await call  # now its worker is idle
        workers = _workers(service.pid)
        assert workers
        await service.stop(signal.SIGKILL)
        assert await _gone(workers)
        await asyncio.gather(call, return_exceptions=True)

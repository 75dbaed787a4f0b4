"""Real processes around a weight-sync service, and a server that misbehaves on demand."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import numpy as np
from aiohttp import web
from tests.nats_server import NatsServer
from tests.ports import free_port
from tests.redis_server import RedisServer

from areal.clients.weight_sync import WeightSyncClient
from areal.config.experiment import GRPOConfig, save_config
from areal.weights.manifest import (
    PolicyVersion,
    build_manifest,
    publish_dir,
    read_manifest,
    staging_dir,
    version_dir,
    write_manifest,
)
from areal.weights.safetensors import digest_of
from areal.weights.servers import InferenceServer, ServerState

ROOT = Path(__file__).parents[2]


class Process:
    """`python -m MODULE ...`, its log in a file; stopped or killed by pid."""

    def __init__(self, log: Path, module: str, *arguments: str) -> None:
        self._log = log
        self._command = [sys.executable, "-m", module, *arguments]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        env = {**os.environ, "PYTHONPATH": str(ROOT / "services"), "OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=env)

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def wait(self, timeout: float) -> int:
        """Its exit code, once it has ended by itself."""
        assert self._process is not None
        return self._process.wait(timeout)

    def stop(self) -> int:
        return self._end(signal.SIGTERM)

    def send_signal(self, signum: int) -> None:
        assert self._process is not None
        self._process.send_signal(signum)

    def _end(self, signum: int) -> int:
        if self._process is None:
            return 0
        self._process.send_signal(signum)
        self._process.send_signal(signal.SIGCONT)
        code = self._process.wait(60)
        self._process = None
        return code

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""


def inference(tmp_path: Path, model: Path, name: str) -> tuple[Process, str]:
    """A real CPU engine and its url."""
    port = free_port()
    flags = {
        "model-path": model,
        "port": port,
        "context-length": 1024,
        "max-running-requests": 64,
        "max-total-tokens": 65536,
    }
    arguments = [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    process = Process(tmp_path / f"{name}.log", "areal_inference", *arguments)
    return process, f"http://127.0.0.1:{port}"


class WeightSyncRig:
    """The service's process and client, over given stores."""

    def __init__(
        self,
        tmp_path: Path,
        redis: str,
        nats: str,
        model: Path,
        servers: tuple[str, ...] = (),
        **weight_sync,
    ) -> None:
        config = GRPOConfig(experiment_name="test", trial_name=f"t{free_port()}")
        config.run_root = str(tmp_path / "runs")
        config.model.path = str(model)
        config.endpoints.redis, config.endpoints.nats = redis, nats
        config.endpoints.inference = list(servers)
        self.store = config.endpoints.weight_store = f"http://127.0.0.1:{free_port()}"
        config.checkpoint.keep = weight_sync.pop("keep", config.checkpoint.keep)
        config.allocation_mode = weight_sync.pop("allocation_mode", config.allocation_mode)
        for key, value in weight_sync.items():
            setattr(config.weight_sync, key, value)
        self.namespace = config.namespace
        self.model = model
        self.weights_root = (config.run_dir / "weights").resolve()
        self.weights_root.mkdir(parents=True)
        self._tmp_path = tmp_path
        self._config = tmp_path / "config.yaml"
        save_config(config, self._config)
        self.address = f"127.0.0.1:{free_port()}"
        self.metrics = f"127.0.0.1:{free_port()}"
        self.process = self.replica("weight-sync", self.address, self.metrics)
        self.client = WeightSyncClient(self.address, retry_s=60)

    def replica(self, name: str, address: str, metrics: str) -> Process:
        return Process(
            self._tmp_path / f"{name}.log",
            "areal_weight_sync",
            *("--config", str(self._config), "--listen", address, "--metrics", metrics),
        )

    async def started(self) -> None:
        self.process.start()
        await self.client.wait_for("version 0", lambda s: s.current_version >= 0, timeout=60)

    def make_version(self, version: int, incarnation: int = 1) -> PolicyVersion:
        """What a trainer does with new weights: version 0 plus a little noise."""
        from safetensors.numpy import load_file, save_file

        rng = np.random.default_rng(version)
        tensors = {
            name: (array + rng.normal(0, 1e-3, array.shape)).astype(array.dtype)
            for name, array in load_file(self.model / "model.safetensors").items()
        }
        staging = staging_dir(self.weights_root, version, incarnation)
        staging.mkdir()
        save_file(tensors, staging / "model.safetensors")
        shutil.copy(self.model / "config.json", staging)
        write_manifest(build_manifest(staging, version, incarnation), staging)
        final = version_dir(self.weights_root, version, incarnation)
        publish_dir(staging, final)
        return read_manifest(final)

    async def publish(self, version: int, incarnation: int = 1) -> None:
        await self.client.publish_version(self.make_version(version, incarnation))

    async def server(self, url: str) -> InferenceServer | None:
        servers, _ = await self.client.list_servers()
        return next((s for s in servers if s.url == url), None)

    async def until(
        self,
        url: str,
        state: ServerState | None,
        version: int | None = None,
        timeout: float = 90.0,
        cause: str = "",
    ) -> InferenceServer | None:
        """Waits until a server is in a state (None: gone), for a cause in which these words are.

        A probe on its way may end with another cause first; importing torch may take a minute.
        """
        last = None
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            last = await self.server(url)
            if last is None and state is None:
                return None
            there = last is not None and last.state is state and version in (None, last.version)
            if there and cause in last.cause:
                return last
            await asyncio.sleep(0.02)
        raise AssertionError(
            f"waited {timeout} s for {url} {state} at {version} {cause}: {last}\n"
            f"{self.process.log[-4000:]}"
        )

    async def close(self) -> None:
        await self.client.close()
        self.process.stop()


@asynccontextmanager
async def rig_with_stores(
    tmp_path: Path, model: Path, **weight_sync
) -> AsyncIterator[WeightSyncRig]:
    """A rig over a Redis and a NATS of its own; the caller starts it."""
    redis, nats = RedisServer(tmp_path / "redis"), NatsServer(tmp_path / "nats")
    async with AsyncExitStack() as stack:
        for store in (redis, nats):
            store.start()
            stack.callback(store.kill)
        rig = WeightSyncRig(
            tmp_path, redis.url, nats.url, model, probe_interval_s=0.2, **weight_sync
        )
        stack.push_async_callback(rig.close)
        yield rig


class BadServer:
    """SGLang's endpoints, then one of: hang, 500, garbage, lie, slow, reset, stale."""

    def __init__(self) -> None:
        self.mode = "good"
        self.version = "default"
        self.path = ""
        self.paused = False
        self.boot = "bad-1"
        self.stop_hanging = asyncio.Event()
        self.url = ""

    async def start(self) -> None:
        app = web.Application(middlewares=[self._misbehave])
        app.add_routes(
            [
                web.get("/model_info", self._model_info),
                web.get("/server_info", self._server_info),
                web.get("/v1/loads", self._loads),
                web.post("/pause_generation", self._pause),
                web.post("/continue_generation", self._resume),
                web.post("/abort_request", self._ok),
                web.post("/update_weights_from_disk", self._load),
                web.post("/weights_checker", self._checksum),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        port = free_port()
        await web.TCPSite(self._runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        self.stop_hanging.set()
        await self._runner.cleanup()

    @web.middleware
    async def _misbehave(self, request: web.Request, handler) -> web.StreamResponse:
        if self.mode == "hang":
            await self.stop_hanging.wait()
        if self.mode == "slow":
            await asyncio.sleep(4.0)
        if self.mode == "500":
            return web.Response(status=500, text="Internal Server Error: CUDA error")
        if self.mode == "garbage":
            return web.Response(body=b"\x00\x01<html>not json</html>")
        if self.mode == "reset":
            request.transport.abort()
        return await handler(request)

    async def _model_info(self, _: web.Request) -> web.Response:
        version = "41" if self.mode == "lie" else self.version
        return web.json_response({"weight_version": version, "model_path": self.path})

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"startup_time": self.boot, "weight_version": "default"})

    async def _loads(self, _: web.Request) -> web.Response:
        return web.json_response({"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]})

    async def _pause(self, _: web.Request) -> web.Response:
        self.paused = True
        return web.json_response({"status": "ok"})

    async def _resume(self, _: web.Request) -> web.Response:
        self.paused = False
        return web.json_response({"status": "ok"})

    async def _ok(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.version, path = body["weight_version"], body["model_path"]
        if self.mode != "stale":  # stale: says it has loaded, and has not
            self.path = path
        return web.json_response({"success": True, "message": "ok", "num_paused_requests": 0})

    async def _checksum(self, _: web.Request) -> web.Response:
        """Of the very tensors that it was told to load, as areal-inference computes them."""
        from safetensors.numpy import load_file

        sums = {
            name: digest_of(array.tobytes())
            for name, array in load_file(Path(self.path) / "model.safetensors").items()
        }
        return web.json_response({"success": True, "ranks": [{"rank": 0, "checksums": sums}]})


async def generate(session: aiohttp.ClientSession, url: str, tokens: int, version: int) -> dict:
    """One request as the rollout worker sends it."""
    body = {
        "input_ids": [257, 55, 43, 56, 258],
        "sampling_params": {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "extra_key": str(version),
    }
    async with session.post(f"{url}/generate", json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def generate_info(url: str) -> dict:
    """The `meta_info` of four tokens from a server at version 1."""
    async with aiohttp.ClientSession() as session:
        return (await generate(session, url, 4, 1))["meta_info"]

"""A whole generation side for tests, all real: stores, ledger, reward, weight-sync, servers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.nats_server import start_nats
from tests.ports import free_port
from tests.redis_server import start_redis

from areal.chassis.process import PROCESS_VARIABLE
from areal.config.experiment import GRPOConfig, save_config
from areal_torch.models.tiny import make_tiny_model

SERVICES = Path(__file__).parents[1] / "services"


class Process:
    """`python -m MODULE …`, its log in a file."""

    def __init__(self, log: Path, module: str, *arguments: str) -> None:
        self.log_file = log
        environment = {
            **os.environ,
            "PYTHONPATH": str(SERVICES),
            "OMP_NUM_THREADS": "1",
            PROCESS_VARIABLE: log.stem,  # a name that outlives it, as the launcher gives
        }
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdout=stream,
                stderr=stream,
                env=environment,
            )

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float = 60.0) -> int:
        return self._process.wait(timeout)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(60)

    def end(self) -> None:
        if self._process.poll() is None:
            self.terminate()
            try:
                self.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()

    def wait_serving(self, address: str, timeout: float = 120.0) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                with grpc.insecure_channel(address) as channel:
                    stub = health_pb2_grpc.HealthStub(channel)
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
                if answer.status == health_pb2.HealthCheckResponse.SERVING:
                    return
            except grpc.RpcError:
                pass
            time.sleep(0.05)
        raise RuntimeError(f"{address} is not serving: {self.log[-3000:]}")


class Stack:
    """Addresses and processes; `start_stack` fills it in."""

    def __init__(self, folder: Path, config: GRPOConfig) -> None:
        self.folder, self.config = folder, config
        self.config_file = folder / "config.yaml"
        self.processes: dict[str, Process] = {}
        self.metrics: dict[str, str] = {}
        self.addresses: dict[str, str] = {}
        """Where each service listens."""

    def inference(self, name: str, url: str, *, context: int = 2048) -> None:
        port = url.rsplit(":", maxsplit=1)[-1]
        self.processes[name] = Process(
            self.folder / f"{name}.log",
            "areal_inference",
            *("--model-path", self.config.model.path, "--port", port, "--host", "127.0.0.1"),
            *("--context-length", str(context), "--max-running-requests", "64"),
        )

    def service(
        self, name: str, address: str, process: str = "", *, under: Sequence[str] = ()
    ) -> None:
        """Starts a service; `under`: the module that runs the service's module, and arguments."""
        process = process or name
        metrics = self.metrics[process] = f"127.0.0.1:{free_port()}"
        self.addresses[process] = address
        self.processes[process] = Process(
            self.folder / f"{process}.log",
            *(*under, f"areal_{name}"),
            *("--config", str(self.config_file), "--listen", address, "--metrics", metrics),
        )

    def metric(self, process: str, name: str) -> float:
        """The value of a metric without labels."""
        with urllib.request.urlopen(f"http://{self.metrics[process]}/metrics", timeout=60) as page:
            for line in page.read().decode().splitlines():
                if line.startswith(f"{name} "):
                    return float(line.split()[1])
        raise AssertionError(f"{process} has no metric {name}")

    def generating(self, tokens: int, *servers: int, timeout: float = 120.0) -> None:
        """Returns once the requests that run on each of these servers have so many tokens."""
        deadline = time.monotonic() + timeout
        for url in (f"{self.config.endpoints.inference[index]}/v1/loads" for index in servers):
            used = 0
            while used < tokens:
                assert time.monotonic() < deadline, f"{url}: {used} tokens, not {tokens}"
                # It does not listen yet, or answers 503: it is starting.
                with (
                    suppress(urllib.error.URLError),
                    urllib.request.urlopen(url, timeout=60) as it,
                ):
                    used = sum(load["num_used_tokens"] for load in json.load(it)["loads"])
                time.sleep(0.01)

    def wait(self, process: str, address: str) -> None:
        self.processes[process].wait_serving(address)

    def end(self, process: str) -> None:
        self.processes.pop(process).end()

    def close(self) -> None:
        # First of all: they hand their leases to the ledger.
        for name in [each for each in self.processes if each.startswith("rollout")]:
            self.end(name)
        for process in self.processes.values():
            if process._process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            process.end()


@contextmanager
def start_stack(
    folder: Path,
    *,
    servers: int = 2,
    redis: str = "",
    adjust: Callable[[GRPOConfig], None] | None = None,
    **rollout: object,
) -> Iterator[Stack]:
    """Everything but a rollout service.

    Args:
        folder: For files, stores and logs.
        servers: Inference servers, with one tiny model.
        redis: URL of a store that is there already; empty: one of its own.
        adjust: Changes the configuration before anything starts. It may append the URLs of
            inference servers that run already.
        **rollout: Values of the configuration's rollout section.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        config = GRPOConfig(experiment_name="test", trial_name=f"t{uuid.uuid4().hex[:12]}")
        config.run_root = str(folder / "runs")
        config.model.path = str(make_tiny_model(folder / "model", seed=1))
        config.model.context_length = 2048
        for key, value in rollout.items():
            setattr(config.rollout, key, value)
        config.endpoints.redis = redis or stack.enter_context(start_redis(folder))
        config.endpoints.nats = stack.enter_context(start_nats(folder))
        for name in ("buffer", "reward", "weight_sync", "rollout"):
            setattr(config.endpoints, name, f"127.0.0.1:{free_port()}")
        config.endpoints.inference = [f"http://127.0.0.1:{free_port()}" for _ in range(servers)]
        if adjust is not None:
            adjust(config)
        whole = Stack(folder, config)
        save_config(config, whole.config_file)
        stack.callback(whole.close)
        for index, url in enumerate(config.endpoints.inference[:servers]):
            whole.inference(f"inference-{index}", url)
        for name in ("buffer", "reward", "weight_sync"):
            whole.service(name, getattr(config.endpoints, name))
        for name in ("buffer", "reward", "weight_sync"):
            whole.wait(name, getattr(config.endpoints, name))
        yield whole

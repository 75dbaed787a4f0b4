"""A real buffer service for tests: its own process, on a free port."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tests.buffer_client import BufferClient
from tests.ports import free_port


@contextmanager
def start_buffer(
    folder: Path, redis_url: str, *overrides: str, namespace: str = ""
) -> Iterator[str]:
    """Yields host:port once the service is SERVING; ends it with SIGTERM.

    Args:
        folder: For its config and log.
        redis_url: Its Redis.
        overrides: key=value of the experiment file.
        namespace: Trial name shared by replicas; empty: a fresh one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    trial = namespace or f"t{uuid.uuid4().hex[:12]}"
    config = folder / "config.yaml"
    config.write_text(
        f"experiment_name: test\ntrial_name: {trial}\nendpoints: {{redis: '{redis_url}'}}\n"
    )
    address = f"127.0.0.1:{free_port()}"
    log = (folder / f"buffer-{uuid.uuid4().hex[:6]}.log").open("wb")
    command = [sys.executable, "-m", "areal_buffer", "--config", str(config), "--listen", address]
    environment = {**os.environ, "PYTHONPATH": "services", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, *overrides], env=environment, stderr=log)
    try:
        with grpc.insecure_channel(address) as channel:
            grpc.channel_ready_future(channel).result(90)
            health = health_pb2_grpc.HealthStub(channel)
            deadline = time.monotonic() + 90
            while True:
                status = health.Check(health_pb2.HealthCheckRequest(), timeout=60).status
                if status == health_pb2.HealthCheckResponse.SERVING:
                    break
                if time.monotonic() > deadline or process.poll() is not None:
                    raise RuntimeError(f"buffer is not serving; see {log.name}")
                time.sleep(0.02)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            process.kill()
            process.wait(60)
            log.close()


async def register(client: BufferClient, resume_step: int = 0) -> int:
    """As a trainer with batches of two; returns its incarnation."""
    registration = await client.register_trainer(
        resume_step=resume_step,
        batch_size=2,
        max_head_offpolicyness=1,
        max_concurrent_rollouts=64,
    )
    return registration.incarnation

"""`areal submit` against a rollout service whose ledger is full: it waits, and says so."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc
from prometheus_client import CollectorRegistry

from areal.chassis.interceptors import CallInterceptor
from areal.config.experiment import GRPOConfig, save_config
from areal.errors import CapacityExceeded
from areal.v1 import rollout_service_pb2 as rollout_pb
from areal.v1 import rollout_service_pb2_grpc
from areal_launch.processes.process import python_environment
from areal_launch.run_folder import RunFolder

FULL = "the ledger is near its memory limit and has 7 tasks queued; try again in 1 s"


class FullLedger(rollout_service_pb2_grpc.RolloutServiceServicer):
    """Refuses some calls, then takes what comes."""

    def __init__(self) -> None:
        self.refusals = 0
        self.taken: list[str] = []

    async def SubmitTasks(self, request: Any, context: Any) -> Any:
        if self.refusals > 0:
            self.refusals -= 1
            raise CapacityExceeded(FULL)
        self.taken += [task.task_id for task in request.tasks]
        accepted = rollout_pb.SubmitTasksResponse()
        for _ in request.tasks:
            accepted.results.add(accepted=True)
        return accepted

    async def GetTasks(self, request: Any, context: Any) -> Any:
        return rollout_pb.GetTasksResponse()


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[FullLedger]:
    """A run that a launcher holds, whose rollout service has a full ledger."""
    servicer = FullLedger()
    server = grpc.aio.server(interceptors=[CallInterceptor("rollout", CollectorRegistry())])
    rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    config = GRPOConfig()
    config.run_root = str(tmp_path / "runs")
    config.endpoints.rollout = f"127.0.0.1:{port}"
    folder = RunFolder(config.run_dir)
    lock = folder.lock()
    save_config(config, folder.config_file)
    folder.write_stack({"state": "ready"})
    (tmp_path / "tasks.jsonl").write_text('{"task_id": "a", "prompt": "1+1=", "answer": "2"}\n')
    yield servicer
    os.close(lock)
    await server.stop(None)


async def submit(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        lambda: subprocess.run(
            [sys.executable, "-m", "areal_launch.cli", "submit", "tasks.jsonl", *options],
            cwd=folder,
            env=python_environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
    )


async def test_submit_when_the_ledger_is_full_for_now_then_it_waits_and_says_so_once(
    tmp_path: Path, ledger: FullLedger
) -> None:
    ledger.refusals = 2
    done = await submit(tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"waiting for room: {FULL}", "submitted 1 tasks"]
    assert ledger.taken == ["a"]


async def test_submit_when_the_ledger_stays_full_then_one_line_says_what_was_waited_for(
    tmp_path: Path, ledger: FullLedger
) -> None:
    ledger.refusals = 1_000
    done = await submit(tmp_path, "--timeout", "2")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    for word in ("1 of 1 tasks, e.g. a", "rollout 127.0.0.1", "--timeout 2", FULL):
        assert word in line
    assert ledger.taken == []

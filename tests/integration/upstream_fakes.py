"""The services behind the gateway, small and in memory, on a real grpc.aio server."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from prometheus_client import CollectorRegistry

from areal.chassis.interceptors import CallInterceptor
from areal.errors import CapacityExceeded, InvalidInput
from areal.protocol.trajectories import STATE_TO_PB, group_to_pb
from areal.types import TaskState, Trajectory, TrajectoryGroup
from areal.v1 import (
    buffer_service_pb2,
    buffer_service_pb2_grpc,
    policy_pb2,
    rollout_service_pb2,
    rollout_service_pb2_grpc,
    trainer_service_pb2,
    trainer_service_pb2_grpc,
    trajectory_pb2,
    weight_sync_service_pb2,
    weight_sync_service_pb2_grpc,
)


@dataclass
class FakeRun:
    """What the fakes tell; change it and they tell something else."""

    counts: dict[str, int] = field(default_factory=lambda: {s.value: 0 for s in TaskState})
    trajectories: int = 0
    generated_tokens: int = 0
    policy_version: int = 0
    staleness_mean: float = 0.0
    staleness_max: int = 0
    max_head_offpolicyness: int = 2
    max_concurrent_rollouts: int = 256
    admission_headroom: int = 64
    servers: list[policy_pb2.InferenceServer] = field(default_factory=list)
    trainer_state: str = "TRAINING"
    trainer_detail: str = ""
    step: int = 0
    total_steps: int = 100
    incarnation: int = 1
    rows: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[tuple[str, int, float]] = field(default_factory=list)
    """(name, step, mean reward)."""
    dead_letters: list[buffer_service_pb2.DeadLetter] = field(default_factory=list)
    tasks: dict[str, trajectory_pb2.TaskRecord] = field(default_factory=dict)
    failures: list[buffer_service_pb2.WorkflowFailure] = field(default_factory=list)
    stopped: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def change(self) -> None:
        """Wakes long polls and watches."""
        self.changed.set()
        self.changed = asyncio.Event()


class FakeLedger(buffer_service_pb2_grpc.BufferServiceServicer):
    def __init__(self, run: FakeRun) -> None:
        self.run = run
        self.calls = 0

    async def GetStats(self, request: Any, context: Any) -> Any:
        run = self.run
        self.calls += 1
        return buffer_service_pb2.GetStatsResponse(
            submitted=sum(run.counts.values()),
            counts=[
                buffer_service_pb2.StateCount(state=STATE_TO_PB[TaskState(k)], tasks=v)
                for k, v in run.counts.items()
            ],
            policy_version=run.policy_version,
            incarnation=run.incarnation,
            max_head_offpolicyness=run.max_head_offpolicyness,
            max_concurrent_rollouts=run.max_concurrent_rollouts,
            admission_headroom=run.admission_headroom,
            batch_size=64,
            staleness_mean=run.staleness_mean,
            staleness_max=run.staleness_max,
            trajectories=run.trajectories,
            generated_tokens=run.generated_tokens,
            redis_memory_bytes=48_500_000,
            failures=run.failures,
            stopped=run.stopped,
        )

    async def ListDeadLetters(self, request: Any, context: Any) -> Any:
        return buffer_service_pb2.ListDeadLettersResponse(
            dead_letters=self.run.dead_letters[: request.limit]
        )


class FakeWeightSync(weight_sync_service_pb2_grpc.WeightSyncServiceServicer):
    def __init__(self, run: FakeRun) -> None:
        self.run = run

    async def ListServers(self, request: Any, context: Any) -> Any:
        return weight_sync_service_pb2.ListServersResponse(
            servers=self.run.servers, current_version=self.run.policy_version
        )

    async def WatchVersions(self, request: Any, context: Any) -> AsyncIterator[Any]:
        while True:
            changed = self.run.changed
            version = self.run.policy_version
            yield weight_sync_service_pb2.WatchVersionsResponse(
                current=policy_pb2.PolicyVersion(version=version, path="/weights"),
                confirmed_servers=sum(s.version == version for s in self.run.servers),
                servers=len(self.run.servers),
                confirmed_version=version,
                updates=version,
                update_seconds_mean=0.031,
            )
            await changed.wait()


class FakeTrainer(trainer_service_pb2_grpc.TrainerServiceServicer):
    def __init__(self, run: FakeRun) -> None:
        self.run = run

    async def GetStatus(self, request: Any, context: Any) -> Any:
        run = self.run
        changed = run.changed
        rows = [r for r in run.rows if r["step"] > request.after_step]
        if not rows and request.max_wait.ToMilliseconds():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), request.max_wait.ToMilliseconds() / 1000)
            rows = [r for r in run.rows if r["step"] > request.after_step]
        return trainer_service_pb2.GetStatusResponse(
            state=trainer_service_pb2.TrainerState.Value(f"TRAINER_STATE_{run.trainer_state}"),
            step=run.step,
            total_steps=run.total_steps,
            incarnation=run.incarnation,
            world_size=2,
            detail=run.trainer_detail,
            rows=[
                trainer_service_pb2.StepRow(step=r["step"], metrics_json=json.dumps(r))
                for r in rows
            ],
            evaluations=[
                trainer_service_pb2.Evaluation(name=name, step=step, mean_reward=mean)
                for name, step, mean in run.evaluations
            ],
        )


class FakeRollout(rollout_service_pb2_grpc.RolloutServiceServicer):
    def __init__(self, run: FakeRun) -> None:
        self.run = run

    async def SubmitTasks(self, request: Any, context: Any) -> Any:
        for task in request.tasks:
            if task.workflow.name == "full":
                raise CapacityExceeded("the ledger is near its memory limit; try again in 4 s")
            if task.workflow.name == "nope":
                raise InvalidInput(f"task {task.task_id!r} workflow.name 'nope': unknown workflow")
        results = []
        for task in request.tasks:
            accepted = task.task_id not in self.run.tasks
            if accepted:
                self.run.tasks[task.task_id] = trajectory_pb2.TaskRecord(
                    task=task, state=trajectory_pb2.TASK_STATE_QUEUED
                )
            results.append(trajectory_pb2.SubmitResult(task_id=task.task_id, accepted=accepted))
        return rollout_service_pb2.SubmitTasksResponse(results=results)

    async def GetTasks(self, request: Any, context: Any) -> Any:
        records = []
        for task_id in request.task_ids:
            if task_id in self.run.tasks:
                record = trajectory_pb2.TaskRecord()
                record.CopyFrom(self.run.tasks[task_id])
                if not request.include_trajectories:
                    record.ClearField("group")
                records.append(record)
        return rollout_service_pb2.GetTasksResponse(records=records)

    async def CancelTasks(self, request: Any, context: Any) -> Any:
        cancelled = 0
        for task_id in request.task_ids:
            record = self.run.tasks.get(task_id)
            if record is not None and record.state == trajectory_pb2.TASK_STATE_QUEUED:
                record.state = trajectory_pb2.TASK_STATE_CANCELLED
                record.reason = request.reason
                cancelled += 1
        return rollout_service_pb2.CancelTasksResponse(cancelled=cancelled)

    def deliver(self, task_id: str) -> None:
        """Ends a task with one trajectory."""
        record = self.run.tasks[task_id]
        record.state = trajectory_pb2.TASK_STATE_DELIVERED
        trajectory = Trajectory(
            trajectory_id=f"{task_id}/0",
            input_ids=np.array([5, 6, 7], np.int32),
            loss_mask=np.array([0, 1, 1], np.bool_),
            behavior_logprobs=np.array([0, -0.5, -0.25], np.float32),
            token_versions=np.array([-1, 3, 4], np.int32),
            rewards=np.array([0, 0, 1], np.float32),
            completion_text="42",
        )
        record.group.CopyFrom(group_to_pb(TrajectoryGroup(task_id, [trajectory])))


class Upstream:
    """All fakes, each group on its own server, so that one can go away alone."""

    def __init__(self, run: FakeRun) -> None:
        self.run = run
        self.ledger = FakeLedger(run)
        self.rollout = FakeRollout(run)
        self.servers: dict[str, grpc.aio.Server] = {}
        self.addresses: dict[str, str] = {}

    async def start(self, *names: str) -> None:
        """Starts the named services (all when none is named), at the address they had before."""
        adders = {
            "buffer": lambda s: buffer_service_pb2_grpc.add_BufferServiceServicer_to_server(
                self.ledger, s
            ),
            "weight_sync": (
                lambda s: weight_sync_service_pb2_grpc.add_WeightSyncServiceServicer_to_server(
                    FakeWeightSync(self.run), s
                )
            ),
            "trainer": lambda s: trainer_service_pb2_grpc.add_TrainerServiceServicer_to_server(
                FakeTrainer(self.run), s
            ),
            "rollout": lambda s: rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server(
                self.rollout, s
            ),
        }
        for name in names or tuple(adders):
            server = grpc.aio.server(interceptors=[CallInterceptor(name, CollectorRegistry())])
            adders[name](server)
            address = self.addresses.get(name, "127.0.0.1:0")
            port = server.add_insecure_port(address)
            self.addresses[name] = f"127.0.0.1:{port}"
            await server.start()
            self.servers[name] = server

    async def stop(self, *names: str) -> None:
        """Stops the named services (all when none is named)."""
        for name in names or tuple(self.servers):
            await self.servers.pop(name).stop(0)

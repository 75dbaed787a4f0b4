from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import grpc
from google.protobuf.duration_pb2 import Duration
from prometheus_client import CollectorRegistry, generate_latest

from areal.runs.status import Evaluation, TrainerStatus
from areal.v1 import trainer_service_pb2 as pb
from areal_trainer.metrics import TrainerCollector
from areal_trainer.servicer import MAX_ROWS, TrainerService

NO_CONTEXT = cast("grpc.aio.ServicerContext[Any, Any]", None)


def started(rows: int = 0) -> TrainerStatus:
    status = TrainerStatus(total_steps=5000, world_size=2)
    status.opened(3, 0, [])
    for step in range(1, rows + 1):
        status.finished_step(step, {"step": step, "reward/mean": step / 10, "staleness/max": 1})
    return status


async def ask(status: TrainerStatus, after_step: int, wait_s: float = 0.0) -> pb.GetStatusResponse:
    wait = Duration()
    wait.FromMilliseconds(int(wait_s * 1000))
    request = pb.GetStatusRequest(after_step=after_step, max_wait=wait)
    return await TrainerService(status).GetStatus(request, NO_CONTEXT)


async def test_status_when_asked_after_a_step_then_only_later_rows() -> None:
    reply = await ask(started(rows=3), after_step=1)
    assert (reply.step, reply.total_steps, reply.incarnation, reply.world_size) == (3, 5000, 3, 2)
    assert [json.loads(row.metrics_json)["step"] for row in reply.rows] == [2, 3]


async def test_status_when_far_behind_then_rows_come_in_pages_from_the_oldest() -> None:
    reply = await ask(started(rows=MAX_ROWS + 10), after_step=0)
    assert [reply.rows[0].step, reply.rows[-1].step] == [1, MAX_ROWS]


async def test_status_when_a_step_ends_then_the_waiting_call_returns_with_it() -> None:
    status = started()
    waiting = asyncio.create_task(ask(status, after_step=0, wait_s=100))
    await asyncio.sleep(0)
    await asyncio.to_thread(status.finished_step, 1, {"step": 1})
    reply = await asyncio.wait_for(waiting, timeout=60)
    assert [row.step for row in reply.rows] == [1]


async def test_status_when_the_recipe_failed_then_the_cause_is_told_without_waiting() -> None:
    status = started()
    status.ended("ValueError: no")
    reply = await asyncio.wait_for(ask(status, after_step=0, wait_s=100), timeout=60)
    assert reply.state == pb.TRAINER_STATE_FAILED
    assert reply.detail == "ValueError: no"


def test_metrics_when_scraped_then_the_last_row_and_nothing_made_up() -> None:
    registry = CollectorRegistry()
    TrainerCollector(started(rows=3), registry)
    text = generate_latest(registry).decode()
    assert "areal_trainer_finished_steps 3.0" in text
    assert "areal_trainer_reward_mean 0.3" in text
    assert "loss_value" not in text


async def test_status_when_held_out_rows_were_measured_then_tells_each() -> None:
    status = started(rows=2)
    status.evaluated(Evaluation("heldout", 2, 0.5))
    reply = await ask(status, after_step=0)
    assert [(e.name, e.step, e.mean_reward) for e in reply.evaluations] == [("heldout", 2, 0.5)]

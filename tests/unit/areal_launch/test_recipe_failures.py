"""A recipe that fails is on every screen, with the reason, and only while it is this run's."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace

import pytest
from rich.console import Console
from tests.unit.areal_launch.test_live_view import draw, make_snapshot, make_stack
from tests.unit.areal_launch.test_poller import Upstream
from tests.unit.areal_launch.test_summary import summarize
from tests.waiting import until

from areal.types import TaskState
from areal.v1 import buffer_service_pb2 as pb
from areal_launch.processes.supervisor import ProcessState
from areal_launch.stack.remote import RemoteProcess
from areal_launch.view.display import PlainDisplay
from areal_launch.view.live_view import plain_line
from areal_launch.view.poller import Snapshot, StackPoller
from areal_launch.view.summary import summary_lines

DETAIL = "reward 'reward_fn' (function): reward_fn raised KeyError: 'solution' (/tmp/mine.py:41)"


class FailingLedger(Upstream):
    """Its ledger tells of a failure, and of the trainer that it belongs to."""

    def __init__(self, incarnation: int) -> None:
        super().__init__()
        self.answer = pb.GetStatsResponse(submitted=9, incarnation=incarnation, retried=3)
        self.answer.failures.add(
            site="KeyError at mine.py:41", attempts=5, task_id="e0-2", detail=DETAIL
        )
        self.buffer.GetStats = self.stats  # type: ignore[method-assign]

    async def stats(self, *_: object) -> pb.GetStatsResponse:
        return self.answer


async def failing_snapshot(incarnation: int = 1) -> Snapshot:
    """What a poller makes of it; the trainer that runs is of incarnation 1."""
    upstream = FailingLedger(incarnation)
    poller = StackPoller(await upstream.start())
    try:
        return await poller.refresh()
    finally:
        await poller.close()
        await upstream.server.stop(0)


async def test_view_when_a_reward_fails_then_task_place_and_message_are_on_the_screen() -> None:
    seen = await failing_snapshot()
    text = draw(make_stack(gateway=("up", 0)), replace(make_snapshot(), ledger=seen.ledger))
    flat = " ".join(line.strip(" │") for line in text.splitlines())
    assert f"task e0-2 failed: {DETAIL} (5 attempts)" in " ".join(flat.split())


async def test_notices_when_a_reward_fails_and_tasks_are_tried_again_then_told_once() -> None:
    upstream = FailingLedger(1)
    poller = StackPoller(await upstream.start(), interval_s=0.02)
    told: list[str] = []
    poller.listen_notices(told.append)
    poller.start()
    try:
        await until(lambda: len(told) == 2, state=lambda: str(told))
        upstream.answer.failures.add(site="another", attempts=1, task_id="e0-7", detail="boom")
        await until(lambda: len(told) == 3, state=lambda: str(told))
        await asyncio.sleep(0.1)
    finally:
        await poller.close()
        await upstream.server.stop(0)
    assert told == [
        f"task e0-2 failed: {DETAIL}",
        "3 tasks that failed because of the recipe are tried again",
        "task e0-7 failed: boom",
    ]


async def test_failures_when_of_the_run_before_then_not_shown() -> None:
    seen = await failing_snapshot(incarnation=7)
    assert (seen.failures, seen.retried) == ((), 0)


def test_plain_line_when_tasks_were_rejected_and_given_up_then_it_counts_them() -> None:
    snapshot = make_snapshot()
    assert snapshot.ledger is not None
    snapshot.ledger.counts.update({TaskState.REJECTED: 12, TaskState.DEAD_LETTERED: 3})
    line = plain_line(make_stack(), snapshot)
    assert "12 rejected, 3 dead-lettered" in line


def test_views_when_steps_wait_for_their_checkpoint_then_their_tasks_are_in_training() -> None:
    snapshot = make_snapshot()
    assert snapshot.ledger is not None
    snapshot.ledger.counts.update({TaskState.BATCHED: 544, TaskState.TRAINED: 0})
    assert "544 in training" in plain_line(make_stack(), snapshot)
    assert "544 in training" in draw(make_stack(gateway=("up", 0)), snapshot)
    snapshot.ledger.counts.update({TaskState.BATCHED: 0, TaskState.TRAINED: 544})
    assert "544 trained and saved" in draw(make_stack(gateway=("up", 0)), snapshot)


async def test_summary_when_the_run_was_stopped_then_cause_and_failures_are_in_it() -> None:
    snapshot = await failing_snapshot()
    assert snapshot.ledger is not None
    snapshot.ledger.counts[TaskState.DEAD_LETTERED] = 16
    summary = summarize(status="failed", snapshot=snapshot, cause="trainer: the first 16 tasks …")
    assert summary["cause"] == "trainer: the first 16 tasks …"
    assert summary["recipe_failures"] == [
        {
            "site": "KeyError at mine.py:41",
            "attempts": 5,
            "first_task_id": "e0-2",
            "detail": DETAIL,
        }
    ]
    [line] = [text for label, text in summary_lines(summary) if label == "failed"]
    assert "areal dead-letters list" in line
    assert "run the same command again" in line


@pytest.mark.parametrize(("pause", "words"), [(0.0, "no pause"), (0.012, "12 ms pause each")])
def test_pause_when_servers_generate_all_along_then_it_says_so(pause: float, words: str) -> None:
    snapshot = make_snapshot()
    assert snapshot.sync is not None
    snapshot.sync = replace(snapshot.sync, update_seconds_mean=pause)
    assert words in dict(summary_lines(summarize(snapshot=snapshot)))["weights"]
    assert f"40 updates, {words}" in draw(make_stack(gateway=("up", 0)), snapshot)


async def test_dashboard_when_the_gateway_is_not_up_yet_then_its_address_is_not_told() -> None:
    stack = make_stack(gateway=("starting", 0))
    stack.state = "starting"
    output = io.StringIO()
    display = PlainDisplay(Console(file=output, width=200))
    poller = StackPoller(stack.config.endpoints)
    display.begin(stack, poller, None)
    running = asyncio.create_task(display.run())
    try:
        await asyncio.sleep(1.2)
        assert "http://127.0.0.1:24000" not in output.getvalue() + draw(stack, Snapshot())
        stack.processes["gateway"] = RemoteProcess(ProcessState.UP)
        await until(lambda: "24000" in output.getvalue(), state=output.getvalue)
        assert "dashboard http://127.0.0.1:24000" in output.getvalue()
        assert "http://127.0.0.1:24000" in draw(stack, Snapshot())
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await poller.close()

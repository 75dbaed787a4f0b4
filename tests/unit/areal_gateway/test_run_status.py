"""The run's status: one state for many pages, rows across a trainer's restart, slow subscribers."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import orjson
import pytest

from areal.types import TaskState
from areal_gateway.status import RunStatus


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_status(clock: Clock | None = None, **changes: Any) -> RunStatus:
    settings = {"history": 50, "max_rows": 100, **changes}
    return RunStatus({"experiment": "e"}, clock=clock or Clock(), **settings)


def ledger(trajectories: int = 0, tokens: int = 0) -> dict[str, Any]:
    counts = {state.value: 0 for state in TaskState}
    return {"counts": counts, "trajectories": trajectories, "generated_tokens": tokens}


def row(step: int, **values: Any) -> dict[str, Any]:
    return {"step": step, **values}


def steps(rows: list[dict[str, Any]]) -> list[int]:
    return [r["step"] for r in rows]


async def next_event(stream: Any) -> tuple[str, Any]:
    name, body = await asyncio.wait_for(anext(stream), 60)
    return name, orjson.loads(body)


async def test_rows_when_trainer_repeats_a_step_then_later_ones_go():
    run = make_status()
    run.add_rows([row(s, run=1) for s in range(1, 6)])
    run.add_rows([row(3, run=2)])
    assert steps(run.rows_after(0)) == [1, 2, 3]
    assert run.rows_after(2) == [row(3, run=2)]
    assert run.last_step == 3
    run.rewind(1)
    assert steps(run.rows_after(0)) == [1]


async def test_rows_when_there_are_too_many_then_some_of_the_middle_go():
    run = make_status(max_rows=10)
    for step in range(1, 26):
        run.add_rows([row(step)])
    kept = steps(run.rows_after(0))
    assert (len(kept) <= 10, kept[:2], kept[-2:]) == (True, [1, 2], [24, 25])
    together = make_status(max_rows=10)
    together.add_rows([row(step) for step in range(1, 26)])
    assert len(steps(together.rows_after(0))) <= 10


async def test_subscribe_when_page_opens_then_history_steps_and_status_come():
    run = make_status()
    run.put("ledger", ledger())
    run.tick()
    run.add_rows([row(1), row(2)])
    async with aclosing(run.subscribe()) as stream:
        name, samples = await next_event(stream)
        assert name == "history"
        assert len(samples) == 1
        assert await next_event(stream) == ("steps", {"reset": True, "rows": [row(1), row(2)]})
        name, status = await next_event(stream)
        assert (name, status["last_step"]) == ("status", row(2))


async def test_subscribe_when_slow_then_it_skips_states_and_misses_no_row():
    run = make_status()
    async with aclosing(run.subscribe()) as stream:
        assert [(await next_event(stream))[0] for _ in range(3)] == ["history", "steps", "status"]
        for step in range(1, 40):  # forty seconds in which the page takes nothing
            run.put("trainer", {"state": "training", "step": step, "total_steps": 50})
            run.add_rows([row(step)])
            run.tick()
        name, body = await next_event(stream)
        assert (name, steps(body["rows"])) == ("steps", list(range(1, 40)))
        name, status = await next_event(stream)
        assert status["trainer"]["step"] == 39
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.02)
        assert not waiting.done()  # 38 older states are not queued anywhere
        run.close()
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(waiting, 60)


async def test_subscribe_when_trainer_resumes_then_page_is_told_to_start_over():
    run = make_status()
    run.add_rows([row(1), row(2), row(3)])
    async with aclosing(run.subscribe()) as stream:
        for _ in range(3):
            await next_event(stream)
        run.rewind(1)
        run.add_rows([row(2, again=True)])
        name, body = await next_event(stream)
        assert (name, body) == ("steps", {"reset": True, "rows": [row(1), row(2, again=True)]})


async def test_subscribe_when_after_is_given_then_only_later_rows_come():
    run = make_status()
    run.add_rows([row(1), row(2), row(3)])
    async with aclosing(run.subscribe(after_step=2)) as stream:
        await next_event(stream)
        assert steps((await next_event(stream))[1]["rows"]) == [3]


async def test_rates_when_counters_grow_then_are_means_of_the_last_seconds():
    clock = Clock()
    run = make_status(clock)
    for second in range(40):
        # 10 a second, then 100 a second from second 20 on.
        done = 10 * second if second < 20 else 200 + 100 * (second - 20)
        run.put("ledger", ledger(trajectories=done, tokens=5 * done))
        run.tick()
        clock.now += 1
    rates = run.status()["rates"]
    assert rates["samples_per_s"] == pytest.approx(100, rel=0.01)
    assert rates["tokens_per_s"] == pytest.approx(500, rel=0.01)


async def test_rates_when_counter_falls_then_there_is_none():
    clock = Clock()
    run = make_status(clock)
    for done in (500, 3):  # a new trial at the same address
        run.put("ledger", ledger(trajectories=done))
        run.tick()
        clock.now += 1
    assert run.status()["rates"] == {"samples_per_s": None, "tokens_per_s": None}


async def test_health_when_source_fails_then_last_value_stays_and_since_is_the_change():
    clock = Clock()
    run = make_status(clock, configured=["ledger"])
    run.put("ledger", ledger(7))
    clock.now = 1010
    run.fail("ledger", "away")
    clock.now = 1020
    run.fail("ledger", "still away")
    status = run.status()
    assert status["ledger"]["trajectories"] == 7
    assert status["sources"]["ledger"] == {
        "configured": True,
        "ok": False,
        "error": "still away",
        "since": 1010,
    }
    assert status["sources"]["trainer"]["configured"] is False
    run.tick()  # no sample of a value that is old
    assert run.status()["sample"] is None


async def test_eta_when_steps_have_times_then_mean_times_what_is_left():
    run = make_status()
    run.add_rows([row(s, **{"time/step": 100.0 if s <= 10 else 2.0}) for s in range(1, 31)])
    run.put("trainer", {"state": "training", "step": 30, "total_steps": 130})
    assert run.status()["eta_s"] == pytest.approx(200)
    run.put("trainer", {"state": "finished", "step": 130, "total_steps": 130})
    assert run.status()["eta_s"] is None


async def test_status_json_when_many_ask_then_encoded_once_per_change():
    run = make_status()
    first = run.status_json()
    assert run.status_json() is first
    run.tick()
    assert run.status_json() is not first


def test_status_when_rows_say_that_the_run_cannot_learn_then_the_page_is_told_until_they_do_not():
    run = make_status()
    run.add_rows([row(s, **{"rollout/truncated": 0.9}) for s in range(1, 13)])
    assert [each["rule"] for each in run.status()["findings"]] == ["answers_cut_off"]
    run.rewind(2)
    assert run.status()["findings"] == []

"""Blocking calls of environments and tools: hung ones keep no thread that others need."""

import asyncio
import subprocess
import sys
import threading
from functools import partial

import pytest
from tests.unit.areal.workflows.scripted_engine import ScriptedEngine
from tests.waiting import until

from areal.errors import WorkflowError
from areal.types import GenerationHyperparameters
from areal.workflows.environment import EnvWorkflow
from areal.workflows.threads import BlockingCalls, CallOverdue, TooManyHung
from areal.workflows.tool import ToolWorkflow


@pytest.fixture
def released():
    event = threading.Event()
    yield event
    event.set()


async def test_calls_when_they_hang_then_others_run_and_the_loops_threads_are_free(released):
    calls = BlockingCalls(max_running=4, max_hung=1000)
    hangs = (calls.run("hang", 0.05, released.wait) for _ in range(100))
    outcomes = await asyncio.gather(*hangs, return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {CallOverdue}
    assert calls.hung == 100
    assert await calls.run("add", 5, partial(sum, (1, 2))) == 3
    assert await asyncio.wait_for(asyncio.to_thread(sum, (1, 2)), 60) == 3


async def test_calls_when_too_many_hang_then_refused_until_they_return(released):
    calls = BlockingCalls(max_running=1, max_hung=2)
    hangs = (calls.run("hang", 0.05, released.wait) for _ in range(4))
    outcomes = await asyncio.gather(*hangs, return_exceptions=True)
    assert [type(o) for o in outcomes] == [CallOverdue, CallOverdue, TooManyHung, TooManyHung]
    with pytest.raises(
        TooManyHung, match="add: not called: 2 earlier calls are still running past their limit"
    ):
        await calls.run("add", 5, partial(sum, (1, 2)))
    released.set()
    await until(lambda: calls.hung == 0, "the hung calls to return")
    assert await calls.run("add", 5, partial(sum, (1, 2))) == 3


async def test_calls_when_many_then_no_more_than_the_limit_run_at_once():
    running, most, lock = 0, 0, threading.Lock()
    together = threading.Barrier(3, timeout=60)  # a call ends only beside two others

    def count():
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        together.wait()
        with lock:
            running -= 1
        together.wait()  # none ends, and makes room, before all three are counted

    calls = BlockingCalls(max_running=3)
    await asyncio.gather(*(calls.run("count", 120, count) for _ in range(21)))
    assert most == 3


async def test_call_when_its_caller_is_canceled_then_its_slot_is_free_once_it_returns(released):
    calls = BlockingCalls(max_running=1)
    task = asyncio.create_task(calls.run("wait", 30, released.wait))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    released.set()
    assert await calls.run("add", 5, partial(sum, (1, 2))) == 3
    assert calls.hung == 0


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), StopIteration()])
async def test_call_when_it_would_end_the_process_then_only_it_fails(error):
    def ends():
        raise error

    with pytest.raises(WorkflowError, match=f"ends: {type(error).__name__}"):
        await BlockingCalls().run("ends", 5, ends)


def test_process_when_a_call_hangs_then_it_exits_all_the_same():
    source = """
import asyncio, threading
from areal.workflows.threads import BlockingCalls, CallOverdue
async def main():
    try:
        await BlockingCalls().run("hang", 0.05, threading.Event().wait)
    except CallOverdue as error:
        print(error)
asyncio.run(main())
"""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "hang: no result within 0.05 s"


async def test_environment_when_many_episodes_hang_then_a_good_one_plays_on(released):
    class World:
        def reset(self, data):
            self.hangs = data["hangs"]
            return "digit?"

        def step(self, action):
            if self.hangs:
                released.wait()
            return "", 1.0, True

    flow = EnvWorkflow(World, GenerationHyperparameters(n_samples=1), step_timeout_s=0.1)

    def play(hangs):
        return flow.arun_episode(ScriptedEngine([["7"]], None), {"hangs": hangs})

    outcomes = await asyncio.gather(*(play(True) for _ in range(20)), return_exceptions=True)
    assert all("no step within 0.1 s" in str(outcome) for outcome in outcomes)
    [one] = await play(False)
    assert one.rewards.sum() == 1.0


async def test_tool_when_too_many_calls_hang_then_the_task_fails_instead_of_the_model(released):
    def search(query: str) -> str:
        released.wait()
        return query

    flow = ToolWorkflow(
        [search], "math", GenerationHyperparameters(n_samples=1), tool_timeout_s=0.05
    )
    flow.calls._blocking = BlockingCalls(max_hung=1)
    asked = '<tool_call>{"name": "search", "arguments": {"query": "x"}}</tool_call>'
    engine = ScriptedEngine([[asked], [asked], ["unused"]], None)
    row = {"prompt": "?", "answer": "1"}
    with pytest.raises(TooManyHung, match="search: not called: 1 earlier calls"):
        await flow.arun_episode(engine, row)

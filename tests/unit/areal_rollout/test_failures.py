"""What is kept of an exception that ended an episode."""

import asyncio

from areal.errors import Unavailable
from areal.protocol.leases import ReturnCause
from areal_rollout.failures import describe_failure


async def fails(number: int) -> None:
    raise ValueError(f"number {number}")


async def failure_of(*attempts) -> BaseException:
    try:
        async with asyncio.TaskGroup() as group:
            for attempt in attempts:
                group.create_task(attempt)
    except BaseExceptionGroup as error:
        return error
    raise AssertionError("nothing failed")


async def away() -> None:
    raise Unavailable("buffer")


async def test_failure_when_all_attempts_raise_the_same_then_its_traceback_is_kept_once():
    end = describe_failure(await failure_of(*[fails(1) for _ in range(8)]))
    assert end.detail.startswith("ValueError: number 1 (")
    assert end.traceback.count("in fails") == 1
    assert "in failure_of" in end.traceback  # where the attempts were started


async def test_failure_when_attempts_raise_different_errors_then_each_is_kept_once():
    error = await failure_of(fails(1), fails(2), away(), fails(1), away())
    end = describe_failure(error)
    assert (end.cause, end.traceback.count("in fails"), end.traceback.count("in away")) == (
        ReturnCause.WORKFLOW_ERROR,
        2,
        1,
    )
    assert "number 2" in end.traceback

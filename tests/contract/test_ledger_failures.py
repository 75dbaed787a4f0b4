"""Errors of the recipe: told from the first one on, and too many of them stop the run."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from tests.ledger_support import EMPTY, Book, new_task, open_book, return_lease, returned

from areal.errors import WorkflowError
from areal.types import Purpose
from areal.v1 import trajectory_pb2

BROKEN, MENDED = "a" * 64, "b" * 64


@pytest.fixture
async def strict(redis_process: str) -> AsyncIterator[Book]:
    """With the shipped limit, and one attempt for each task."""
    async with open_book(redis_process, max_failure_ratio=0.5, max_attempts=1) as book:
        yield book


async def end(book: Book, task_id: str, detail: str = "") -> None:
    """One task from submission to its end: completed, or failed with these words."""
    await book.submit(task_id)
    leases = await book.lease(1)
    token = leases[task_id]
    if not detail:
        await book.complete(task_id, token)
        return
    await return_lease(book.store, returned(task_id, token, "workflow_error", detail=detail))


async def test_run_when_its_first_tasks_all_fail_alike_then_it_is_stopped_with_the_cause(
    strict: Book,
) -> None:
    await strict.register(size=2, eta=100)
    for number in range(15):
        await end(strict, f"e0-{number}", "KeyError (r.py:3)")
    assert (await strict.take(1))[0] == "waiting"
    await end(strict, "e0-15", "KeyError (r.py:3)")
    with pytest.raises(WorkflowError, match=r"first 16 tasks .*task e0-15: KeyError \(r.py:3\)"):
        await strict.take(1)
    with pytest.raises(WorkflowError, match=r"first 16 tasks .*task e0-15"):
        await strict.take(1, "e0-15", "e0-16")  # as rollout_batch asks
    await strict.submit("e0-16")
    leases, reason = await strict.leases(1)
    assert leases == []
    assert "the run was stopped: the first 16" in reason
    assert await strict.counts() == {"dead_lettered": 16, "queued": 1}


async def test_run_when_its_trainer_waits_for_an_evaluation_then_stopped_as_well(
    strict: Book,
) -> None:
    incarnation = await strict.register(size=2, eta=100)
    ids = [f"heldout-{number}" for number in range(16)]
    await strict.submit(*ids, purpose=Purpose.SERVE, incarnation=incarnation)
    await strict.submit("mine", purpose=Purpose.SERVE)
    for task_id, token in (await strict.lease(17)).items():
        if task_id != "mine":
            await strict.return_lease(task_id, token, "workflow_error")
    with pytest.raises(WorkflowError, match="first 16 tasks all failed with the same error"):
        await strict.store.ended(["mine"], incarnation)
    assert await strict.store.ended(["mine"]) == []  # somebody else's wait continues


@pytest.mark.parametrize("others", ["ended well", "failed otherwise"])
async def test_run_when_its_first_tasks_end_differently_then_it_goes_on(
    strict: Book, others: str
) -> None:
    await strict.register(size=2, eta=100)
    for number in range(40):
        other = "" if others == "ended well" else "ValueError (r.py:4)"
        await end(strict, f"e0-{number}", other if number % 2 else "KeyError (r.py:3)")
    assert (await strict.take(1))[0] == ("taken" if others == "ended well" else "waiting")


async def test_run_when_more_than_half_of_its_last_64_tasks_fail_then_it_is_stopped(
    strict: Book,
) -> None:
    await strict.register(size=1000, eta=100)
    for number in range(64):  # long forgotten
        await end(strict, f"good-{number}")
    for number in range(64):  # half of them
        await end(strict, f"half-{number}", f"error {number}" if number % 2 else "")
    assert (await strict.take(1))[0] == "waiting"
    await end(strict, "one", "KeyError (r.py:3)")
    with pytest.raises(WorkflowError, match=r"33 of the last 64 .*task one: KeyError \(r.py:3\)"):
        await strict.take(1)


async def test_run_when_tasks_are_rejected_then_that_is_no_failure(strict: Book) -> None:
    await strict.register(size=2, eta=100)
    for number in range(70):
        await strict.submit(f"e0-{number}")
        token = (await strict.lease(1))[f"e0-{number}"]
        await strict.store.reject(f"e0-{number}", token, "arun_episode returned None")
    assert (await strict.take(1))[0] == "waiting"
    assert await strict.counts() == {"rejected": 70}


async def test_run_when_infrastructure_fails_then_it_is_not_the_recipes_error(
    redis_process: str,
) -> None:
    changes = {"max_failure_ratio": 0.5, "max_infrastructure_attempts": 1}
    async with open_book(redis_process, **changes) as book:
        await book.register(size=2, eta=100)
        for number in range(20):
            await book.submit(f"e0-{number}")
            token = (await book.lease(1))[f"e0-{number}"]
            await book.return_lease(f"e0-{number}", token, "infrastructure")
        assert (await book.take(1))[0] == "waiting"
        assert (await book.store.stats()).failures == ()


def task_of(recipe: str, task_id: str) -> bytes:
    """The body of a task that names a recipe."""
    message = trajectory_pb2.Task.FromString(new_task(task_id).body)
    message.workflow.recipe_digest = recipe
    return message.SerializeToString()


async def registered(book: Book, recipe: str) -> int:
    trainer = await book.store.register_trainer(0, 2, 100, 100, recipe)
    book.incarnation = trainer.incarnation
    return trainer.retried


async def stop(book: Book) -> None:
    """A run under BROKEN that is stopped, with one task still queued and one of someone else."""
    await registered(book, BROKEN)
    ids = [f"e0-{number}" for number in range(17)]
    tasks = [replace(new_task(task_id), body=task_of(BROKEN, task_id)) for task_id in ids]
    await book.store.submit(tasks, incarnation=book.incarnation, seal=False, limit=EMPTY)
    await book.submit("theirs", purpose=Purpose.SERVE)
    for task_id, token in (await book.lease(18)).items():
        if task_id != "e0-16":
            await book.return_lease(task_id, token, "workflow_error")
        else:
            await book.return_lease(task_id, token)
    with pytest.raises(WorkflowError):
        await book.take(1)


@pytest.mark.parametrize("recipe", [MENDED, BROKEN])
async def test_stopped_run_when_a_trainer_comes_again_then_all_its_tasks_are_tried_under_its_recipe(
    strict: Book, recipe: str
) -> None:
    await stop(strict)
    assert await registered(strict, recipe) == 16
    assert (await strict.take(1))[0] == "waiting"
    assert await strict.counts() == {"queued": 17, "dead_lettered": 1}
    assert await strict.state("theirs") == "dead_lettered"
    leases, _ = await strict.leases(100)
    told = [lease.task for lease in leases]
    assert [each.task_id for each in told] == [f"e0-{number}" for number in range(17)]
    assert {each.workflow.recipe_digest for each in told} == {recipe}
    for lease in leases:
        await strict.complete(lease.task.task_id, lease.token)
    assert (await strict.take(1))[0] == "taken"
    stats = await strict.store.stats()
    assert (stats.stopped, stats.failures, stats.retried) == ("", (), 16)


async def test_recipe_when_changed_and_changed_back_then_tasks_run_under_the_newest(
    strict: Book,
) -> None:
    await stop(strict)
    for recipe in (MENDED, BROKEN, "c" * 64, MENDED):
        await registered(strict, recipe)
    leases, _ = await strict.leases(100)
    told = {each.task.workflow.recipe_digest for each in leases}
    assert told == {MENDED}


async def test_task_of_a_client_when_the_trainers_recipe_changes_then_it_keeps_its_own(
    strict: Book,
) -> None:
    await registered(strict, BROKEN)
    theirs = replace(new_task("x", Purpose.SERVE), body=task_of(BROKEN, "x"))
    await strict.store.submit([theirs], incarnation=0, seal=False, limit=EMPTY)
    await registered(strict, MENDED)
    ((lease,), _) = await strict.leases(100)
    assert lease.task.workflow.recipe_digest == BROKEN


async def test_few_failures_when_the_recipe_stays_then_kept_as_dead_letters_and_else_tried_again(
    strict: Book,
) -> None:
    await registered(strict, BROKEN)
    await end(strict, "a", "KeyError (r.py:3)")
    assert await registered(strict, BROKEN) == 0
    assert await strict.state("a") == "dead_lettered"
    assert await registered(strict, MENDED) == 1
    assert await strict.state("a") == "queued"


async def test_failure_when_it_is_the_first_attempt_then_told_with_task_and_words(
    redis_process: str,
) -> None:
    async with open_book(redis_process, max_attempts=3) as book:
        await book.register()
        await book.submit("a", "b")
        for _ in range(2):
            for task_id, token in (await book.lease(1)).items():
                words = {"detail": "no (r.py:3)", "site": "KeyError at r.py:3"}
                end = returned(task_id, token, "workflow_error", **words)
                await return_lease(book.store, end)
        [failure] = (await book.store.stats()).failures
        assert (failure.site, failure.attempts) == ("KeyError at r.py:3", 2)
        assert (failure.task_id, failure.detail) == ("a", "no (r.py:3)")
        assert failure.time > 1_600_000_000
        assert await book.counts() == {"queued": 2}


async def test_failures_when_of_very_many_kinds_then_their_number_is_bounded(
    redis_process: str,
) -> None:
    async with open_book(redis_process, max_attempts=100) as book:
        await book.register()
        await book.submit("a")
        for number in range(50):
            token = (await book.lease(1))["a"]
            end = returned("a", token, "workflow_error", site=f"error {number}")
            await return_lease(book.store, end)
        failures = (await book.store.stats()).failures
        assert len(failures) == 33
        assert (failures[0].site, failures[0].attempts) == ("other errors", 18)

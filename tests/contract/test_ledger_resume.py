"""Steps that are committed, replayed and fenced (L2, L3), against the real scripts on Redis."""

from __future__ import annotations

import pytest
from tests.ledger_support import EMPTY, FULL, Book, finished

from areal.errors import NotFound, StaleIncarnation, WrongStep
from areal.types import Purpose


async def test_commit_when_cumulative_and_repeated_then_fine_and_above_taken_refused(
    book: Book,
) -> None:
    await book.register()
    await book.train(3)
    with pytest.raises(WrongStep, match="CommitStep 4: the last step taken is 3"):
        await book.store.commit(1, 4, 0)
    assert await book.store.commit(1, 2, 0) == 2
    assert await book.store.commit(1, 2, 0) == 2
    assert await book.store.commit(1, 1, 0) == 2
    assert await book.counts() == {"trained": 4, "batched": 2}
    assert await book.store.commit(1, 3, 2) == 3
    assert await book.counts() == {"trained": 6}
    with pytest.raises(WrongStep, match="TakeBatch step 2: its payload was released"):
        await book.take(2)
    with pytest.raises(NotFound, match=r"not part of the batch|was released"):
        _ = [p async for p in book.store.fetch(1, 2, ["s2a"])]
    assert [len(p) async for p in book.store.fetch(1, 3, ["s3b", "s3a"])]


@pytest.mark.parametrize("resume", [1, 2, 3, 4])
async def test_resume_when_from_any_retained_step_then_the_same_batches(
    book: Book, resume: int
) -> None:
    await book.register()
    batches = await book.train(4)
    await book.store.commit(1, 3, 1)
    trainer = await book.store.register_trainer(resume, 2, 1, 100)
    assert (trainer.last_taken_step, trainer.last_committed_step) == (4, 3)
    book.incarnation = trainer.incarnation
    # The first call after a resume repeats the commit of the checkpoint.
    assert await book.store.commit(book.incarnation, resume, min(resume, 1)) >= resume
    for step in range(resume + 1, 5):
        take = await book.store.take(book.incarnation, step, (), limit=FULL)
        assert [group.task_id for group in take.groups] == batches[step - 1]
        assert take.replay
        some = book.store.fetch(book.incarnation, step, batches[step - 1])
        got = [payload async for payloads in some for payload in payloads]
        assert got == [finished(each, step - 1).payload for each in batches[step - 1]]
    assert (await book.take(5))[0] == "waiting"
    await book.run("x", "y", version=4)
    assert await book.take(5) == ("taken", ["x", "y"])


async def test_resume_when_below_what_is_kept_then_names_the_oldest(book: Book) -> None:
    await book.register()
    await book.train(4)
    await book.store.commit(1, 4, 2)
    with pytest.raises(WrongStep, match="the oldest resumable step is 2"):
        await book.register(resume=1)
    with pytest.raises(WrongStep, match="handed out batches only up to step 4"):
        await book.register(resume=5)
    assert await book.register(resume=2) == 2


async def test_resume_when_the_ledger_is_empty_then_goes_on_from_the_checkpoint(
    book: Book,
) -> None:
    # Higher than any that the lost ledger gave out: they are in the names of checkpoints.
    assert await book.register(resume=7) > 10**9
    assert (await book.take(8))[0] == "waiting"
    await book.run("a", "b", version=7)
    assert await book.take(8) == ("taken", ["a", "b"])


async def test_resume_when_generation_went_on_then_bound_holds_and_nothing_is_too_stale(
    book: Book,
) -> None:
    await book.register(size=2, eta=1)
    await book.train(3)  # step 3 is in training; version 2
    await book.submit(*(f"n{i}" for i in range(10)))
    leases = await book.lease(10)
    assert len(leases) == 2  # 2 batched ahead + 2 = (1 + 1) * 2
    for task_id, token in leases.items():
        await book.complete(task_id, token, version=2)
    await book.register(resume=0, size=2, eta=1)
    assert await book.lease(10) == {}
    for step in (1, 2, 3):
        await book.take(step)
    assert await book.lease(10) == {}
    assert await book.take(4) == ("taken", list(leases))
    assert (await book.store.stats()).staleness_max == 1


async def test_two_trainers_when_the_older_calls_then_fenced_everywhere(book: Book) -> None:
    old = await book.register()
    await book.train(1)
    new = await book.register()
    assert new == old + 1
    store = book.store
    for call in (
        store.take(old, 1, (), limit=EMPTY),
        store.take(old, 2, (), limit=EMPTY),
        store.commit(old, 1, 0),
        store.submit([], incarnation=old, seal=True, limit=EMPTY),
        store.cancel([], Purpose.TRAIN, reason="", incarnation=old),
        anext(store.fetch(old, 1, ["s1a"])),
    ):
        with pytest.raises(StaleIncarnation, match="incarnation 1: the current one is 2"):
            await call
    assert await store.commit(new, 1, 0) == 1


@pytest.mark.parametrize("off", [-1, 1])
async def test_calls_when_the_incarnation_is_not_the_current_one_then_refused(
    book: Book, off: int
) -> None:
    await book.register()
    await book.register()
    await book.run("a", "b")
    wrong = book.incarnation + off
    with pytest.raises(StaleIncarnation, match=f"incarnation {wrong}: the current one is 2"):
        await book.store.take(wrong, 1, (), limit=EMPTY)
    assert await book.take(1) == ("taken", ["a", "b"])
    with pytest.raises(StaleIncarnation):
        await book.store.commit(wrong, 1, 0)
    with pytest.raises(StaleIncarnation):
        await book.submit("c", incarnation=wrong)
    assert await book.counts() == {"batched": 2}

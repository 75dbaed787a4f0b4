"""Tasks that outside agents run: leased when opened, renewed by calls, run by no one else."""

from __future__ import annotations

import uuid

import pytest
from tests.ledger_support import EMPTY, FULL, Book, ledger_config, new_task

from areal.chassis.waits import Waits
from areal.errors import CapacityExceeded, InvalidInput, LeaseLost, NotFound
from areal.types import Purpose
from areal.v1 import buffer_service_pb2 as pb
from areal_buffer.ledger import Ledger, Wakes
from areal_buffer.records import MemoryGauge
from areal_buffer.redis_store import RedisStore
from areal_buffer.sessions import SessionStore

KEYS = ["a" * 64, "b" * 64]


class Sessions:
    """The store beside a book, with the shortest ways to say what a test does."""

    def __init__(self, book: Book, **changes: object) -> None:
        config = ledger_config("", namespace=book.namespace, **changes)
        self.book, self.memory = book, MemoryGauge(EMPTY)
        self.store = SessionStore(book.redis, config, self.memory, Waits())
        self._ids: dict[tuple[str, int], str] = {}

    async def open(
        self,
        task_id: str,
        purpose: Purpose = Purpose.TRAIN,
        keys: list[str] = KEYS[:1],
        salt: bytes = b"",
        idle_ms: int = 60_000,
    ) -> pb.OpenSessionResponse:
        return await self.store.open(new_task(task_id, purpose), keys, idle_ms, salt)

    async def update(self, task_id: str, attempt: int = 0, **change: object) -> tuple[int, int]:
        lease = (await self.store.read(task_id, attempt)).lease
        request = pb.UpdateSessionRequest(lease=lease, attempt=attempt, **change)  # type: ignore[arg-type]
        done = await self.store.update(request)
        return done.number, done.open_attempts

    async def begin(self, task_id: str, *ids: int, answers: int = 1, call_id: str = "") -> int:
        prompt = pb.SessionPrompt(token_ids=ids, call_id=call_id or uuid.uuid4().hex)
        begin = pb.SessionBegin(answers=answers, prompt=prompt)
        number, _ = await self.update(task_id, begin=begin)
        for each in range(number, number + answers):
            self._ids[task_id, each] = prompt.call_id
        return number

    async def record(self, task_id: str, number: int, *ids: int, version: int = 0) -> None:
        answer = pb.SessionAnswer(
            token_ids=ids, logprobs=[-0.5] * len(ids), versions=[version] * len(ids)
        )
        call_id = self._ids.get((task_id, number), "unknown")
        record = pb.SessionRecord(number=number, answer=answer, call_id=call_id)
        await self.update(task_id, record=record)

    async def end(self, task_id: str, attempt: int = 0) -> int:
        return (await self.update(task_id, attempt, end=pb.SessionEnd()))[1]

    async def token(self, task_id: str) -> int:
        return (await self.store.read(task_id, 0)).lease.token


@pytest.fixture
def sessions(book: Book) -> Sessions:
    return Sessions(book)


async def test_session_when_opened_then_it_runs_and_no_worker_gets_it(book, sessions):
    await book.register()
    await sessions.open("s")
    assert await book.state("s") == "running"
    assert await book.lease(5) == {}
    assert await book.counts() == {"running": 1}
    stats = await book.store.stats()
    assert stats.admission_headroom == 3


async def test_session_when_opened_again_then_it_is_the_same_one_and_has_its_first_keys(
    book, sessions
):
    await sessions.open("s", keys=KEYS, salt=b"first")
    token = await sessions.token("s")
    again = await sessions.open("s", keys=["c" * 64, "d" * 64], salt=b"second")
    assert (again.salt, again.policy_version) == (b"first", 0)
    assert (await sessions.token("s"), await book.counts()) == (token, {"running": 1})
    assert (await sessions.store.read("s", 1)).key_digest == KEYS[1]
    await book.store.cancel(["s"], None, reason="enough", incarnation=0)
    assert (await sessions.open("s", keys=KEYS, salt=b"third")).salt == b"first"


async def test_session_when_opened_again_with_another_request_then_refused(book, sessions):
    await sessions.open("s", keys=KEYS, salt=b"first")
    for other in (
        {"keys": KEYS[:1]},
        {"keys": KEYS, "idle_ms": 1_000},
        {"keys": KEYS, "purpose": Purpose.SERVE},
    ):
        with pytest.raises(InvalidInput, match="session s: it was opened by another request"):
            await sessions.open("s", **other)
    await book.submit("t")
    with pytest.raises(InvalidInput, match="task_id t: a task of this id exists already"):
        await sessions.open("t")


async def test_session_when_opened_beyond_the_staleness_bound_then_told_when_to_try_again(
    book, sessions
):
    await book.register(size=2, eta=0)
    await sessions.open("a")
    await sessions.open("b")
    with pytest.raises(
        CapacityExceeded, match=r"admission: 2 running .*try again in 1 s"
    ) as caught:
        await sessions.open("c")
    assert caught.value.retry_after_s == 1
    await sessions.open("serves", Purpose.SERVE)
    sessions.memory.limit_bytes = FULL
    with pytest.raises(CapacityExceeded, match="memory limit; try again"):
        await sessions.open("d", Purpose.SERVE)


async def test_session_when_queued_rows_fill_every_place_then_it_gets_every_other_one(
    book, sessions
):
    await book.register(size=1, eta=0)
    await book.submit(*(f"t{i}" for i in range(9)))
    order, (row, token) = [], next(iter((await book.lease(5)).items()))
    for step in range(1, 5):
        order.append(row)
        with pytest.raises(CapacityExceeded):
            await sessions.open(f"s{step}")
        assert await book.complete(row, token, version=step - 1)
        assert (await book.take(step))[0] == "taken"
        await book.store.confirm(book.incarnation, step)
        given, reason = await book.leases(5)  # a worker is there first
        if given:
            row, token = given[0].task.task_id, given[0].token
            continue
        assert reason.endswith("slots reserved for agents whose session was refused: 1")
        await sessions.open(f"s{step}")
        row, token = f"s{step}", await sessions.token(f"s{step}")
    assert order == ["t0", "s1", "t1", "s3"]
    assert await book.held() == await book.recount()


async def test_session_when_every_slot_is_taken_then_one_is_kept_for_it_but_not_from_named_rows(
    book, sessions
):
    await book.register(size=2, eta=1, concurrent=1)
    await book.submit("a", "b", "named")
    [(row, token)] = (await book.lease(5)).items()
    with pytest.raises(CapacityExceeded, match="max_concurrent_rollouts reached: 1 running"):
        await sessions.open("s")
    assert await book.complete(row, token)
    assert await book.lease(5) == {}
    assert (await book.take(1, "named"))[0] == "waiting"  # rollout_batch needs exactly this one
    assert list(await book.lease(5)) == ["named"]


async def test_place_kept_for_a_session_when_its_agent_stays_away_then_a_row_gets_it(
    book, sessions
):
    await book.register(size=1, eta=0, concurrent=4)
    await book.submit("a", "b")
    await book.submit("c", "d", purpose=Purpose.SERVE)
    leases = await book.lease(5)
    assert set(leases) == {"a", "c", "d"}
    for purpose in Purpose:
        with pytest.raises(CapacityExceeded):
            await sessions.open("s", purpose)
    await book.submit("e", purpose=Purpose.SERVE)
    assert await book.complete("d", leases["d"])
    await book.store.cancel(["a"], None, reason="", incarnation=0)
    assert await book.lease(5) == {}
    await book.pass_kept_places()
    assert set(await book.lease(5)) == {"b", "e"}


async def test_place_kept_for_a_session_when_no_one_asks_again_then_it_lapses_by_itself(book):
    config = ledger_config("", namespace=book.namespace, kept_place_ms=30)
    store = SessionStore(book.redis, config, MemoryGauge(EMPTY), Waits())
    ledger = Ledger(RedisStore(book.redis, config, Waits()), Wakes(), MemoryGauge(EMPTY), Waits())
    await book.register(size=1, eta=0)
    await book.submit("a", "b")
    [(row, token)] = (await book.lease(5)).items()
    with pytest.raises(CapacityExceeded):
        await store.open(new_task("s"), KEYS[:1], 60_000, b"")
    await book.store.reject(row, token, "too easy")
    assert len((await ledger.lease_tasks("w", 1, 20.0)).leases) == 1


async def test_calls_when_recorded_twice_then_kept_once_and_in_order(book, sessions):
    await sessions.open("s")
    first = await sessions.begin("s", 1, 2, answers=2, call_id="x")
    assert first == await sessions.begin("s", 1, 2, answers=2, call_id="x") == 0
    assert await sessions.begin("s", 3) == 2
    await sessions.record("s", 1, 7, 8, version=4)
    await sessions.record("s", 1, 9)
    reward = pb.SessionReward(number=1, value=0.25)
    await sessions.update("s", reward=reward)
    await sessions.update("s", reward=pb.SessionReward(value=1.5, parts={"gone": 1}))
    await sessions.update("s", reward=pb.SessionReward(value=1.5, parts={"short": 0.1, "c": 0}))
    found = await sessions.store.read("s", 0)
    assert [list(call.prompt.token_ids) for call in found.calls] == [[1, 2], [], [3]]
    assert [call.HasField("prompt") for call in found.calls] == [True, False, True]
    assert [call.HasField("answer") for call in found.calls] == [False, True, False]
    assert list(found.calls[1].answer.token_ids) == [7, 8]
    assert list(found.calls[1].answer.versions) == [4, 4]
    assert (found.calls[1].reward, found.outcome, found.ended) == (0.25, 1.5, False)
    assert (dict(found.calls[1].reward_parts), dict(found.outcome_parts)) == (
        {},
        {"short": 0.1, "c": 0.0},
    )
    with pytest.raises(NotFound, match="answer 3: the session has 3"):
        await sessions.record("s", 3, 1)
    assert await book.held() == await book.recount()


async def test_session_when_calls_come_then_its_lease_is_renewed(book, sessions):
    await sessions.open("s")
    running = f"{book.prefix}running:train"
    await book.redis.zadd(running, {"s": 1})
    await sessions.begin("s", 1)
    await book.store.sweep()
    assert await book.state("s") == "running"


@pytest.mark.parametrize("purpose", Purpose)
async def test_session_when_its_agent_is_silent_then_it_expires_by_name(book, sessions, purpose):
    await sessions.open("s", purpose)
    number = await sessions.begin("s", 1)
    await book.expire_lease("s")
    assert await book.counts() == {"expired": 1}
    found = await sessions.store.read("s", 0)
    assert found.record.reason == "session expired: its agent was silent for 60 s"
    assert not found.calls
    with pytest.raises(LeaseLost, match="session s is expired: session expired: its agent was"):
        await sessions.record("s", number, 2)
    assert await book.lease(5) == {}
    assert await book.held() == await book.recount()


async def test_group_when_an_attempt_is_silent_then_a_worker_gets_those_that_have_ended(
    book, sessions
):
    await book.register(size=1, eta=1)
    await sessions.open("s", keys=[*KEYS, "c" * 64])
    agents = await sessions.token("s")
    await sessions.record("s", await sessions.begin("s", 1), 2)
    assert (await sessions.end("s"), await sessions.end("s", 2)) == (2, 1)
    await book.store.confirm(book.incarnation, 0)
    await book.expire_lease("s")
    assert await book.counts() == {"queued": 1}
    [lease], _ = await book.leases(5)
    assert (lease.task.task_id, lease.attempts) == ("s", 3)
    ended, silent = [await sessions.store.read("s", attempt) for attempt in (0, 1)]
    assert (ended.ended, ended.expired, len(ended.calls)) == (True, False, 1)
    assert (silent.ended, silent.expired) == (False, True)
    why = "session expired: its agent was silent for 60 s; 2 of 3 attempts had ended"
    assert silent.record.reason == why
    for attempt, change in ((1, "begin"), (1, "end"), (0, "reward")):
        part = {"begin": pb.SessionBegin(answers=1, prompt=pb.SessionPrompt(call_id="x"))}
        more = {change: part.get(change, getattr(pb, f"Session{change.capitalize()}")())}
        with pytest.raises(LeaseLost, match=why):
            await sessions.update("s", attempt, **more)
    assert await sessions.end("s", 2) == 1  # its answer was lost, its agent asks again
    with pytest.raises(LeaseLost, match="its newest lease is"):
        await book.complete("s", agents)
    assert await book.complete("s", lease.token)
    assert (await sessions.store.read("s", 1)).expired
    assert not await book.redis.keys(f"{book.prefix}calls:*")
    assert await book.held() == await book.recount()
    assert await book.take(1) == ("taken", ["s"])


async def test_attempts_when_all_ended_and_their_group_was_not_made_then_a_worker_makes_it(
    book, sessions
):
    await sessions.open("s", Purpose.SERVE)
    await sessions.record("s", await sessions.begin("s", 1), 2)
    assert await sessions.end("s") == 0
    await book.expire_lease("s")  # the worker was killed before it had completed the task
    assert not (await sessions.store.read("s", 0)).expired
    [(task_id, token)] = (await book.lease(5)).items()
    assert await book.complete(task_id, token)
    assert await book.state("s") == "delivered"


async def test_group_of_ended_attempts_when_leased_then_its_floor_is_that_of_its_agents(
    book, sessions
):
    await book.register(size=1, eta=1)
    for task_id in ("first", "s"):
        await sessions.open(task_id, keys=KEYS)
    await sessions.end("s")
    assert await book.complete("first", await sessions.token("first"))
    assert await book.take(1) == ("taken", ["first"])
    await book.store.confirm(book.incarnation, 1)
    await book.expire_lease("s")
    token = (await book.lease(5))["s"]
    assert (await sessions.store.read("s", 0)).policy_version == 0
    assert await book.complete("s", token, version=0)
    assert await book.take(2) == ("taken", ["s"])


async def test_group_of_ended_attempts_when_too_stale_then_it_expires(book, sessions):
    await book.register(size=1, eta=1)
    for task_id in ("first", "s"):
        await sessions.open(task_id, keys=KEYS)
    await sessions.end("s")
    assert await book.complete("first", await sessions.token("first"))
    await book.expire_lease("s")
    token = (await book.lease(5))["s"]
    assert await book.take(1) == ("taken", ["first"])
    assert (await book.take(2))[0] == "waiting"
    await sessions.open("fresh")
    assert await book.complete("fresh", await sessions.token("fresh"), version=1)
    assert (await book.take(2))[0] == "waiting"  # the worker may still complete it in time
    await book.pass_straggler_deadline()
    assert await book.take(2) == ("taken", ["fresh"])
    assert await book.state("s") == "expired"
    with pytest.raises(LeaseLost, match="the task is expired"):
        await book.complete("s", token)
    assert await book.held() == await book.recount()


@pytest.mark.parametrize(
    ("cause", "state"),
    [("drain", "queued"), ("infrastructure", "queued"), ("workflow_error", "expired")],
)
async def test_group_of_ended_attempts_when_returned_then_only_a_failed_merge_expires(
    book, sessions, cause, state
):
    await sessions.open("s", keys=KEYS)
    await sessions.record("s", await sessions.begin("s", 1), 2)
    await sessions.end("s")
    await book.expire_lease("s")
    token = (await book.lease(5))["s"]
    assert await book.return_lease("s", token, cause, partial=b"journal") == state
    assert await book.held() == await book.recount()
    assert len((await sessions.store.read("s", 0)).calls) == (1 if state == "queued" else 0)


async def test_group_of_ended_attempts_when_its_workers_die_then_again_and_at_last_it_expires(
    book, sessions
):
    await sessions.open("s", keys=KEYS)
    await sessions.end("s")
    await book.expire_lease("s")
    leases = 0
    while "s" in await book.lease(5):
        leases += 1
        await book.expire_lease("s")
    assert 1 < leases < 10
    record = (await sessions.store.read("s", 0)).record
    assert (await book.state("s"), record.reason) == (
        "expired",
        "lease expired: worker w was silent for 60 s",
    )
    assert await book.held() == await book.recount()


async def test_lease_of_ended_attempts_when_renewed_then_for_as_long_as_any_workers(book, sessions):
    await sessions.open("s", keys=KEYS, idle_ms=3_600_000)
    await sessions.end("s")
    await book.expire_lease("s")
    token = (await book.lease(5))["s"]
    assert await book.store.renew("w", [("s", token)]) == []
    expiry = await book.redis.zscore(f"{book.prefix}running:train", "s")
    seconds, _ = await book.redis.time()
    assert expiry / 1000 - seconds < 100


async def test_leases_when_an_outage_ends_then_a_session_has_its_own_lifetime(book, sessions):
    await sessions.open("s", idle_ms=3_600_000)
    await book.redis.zadd(f"{book.prefix}running:train", {"s": 1})
    await book.redis.hset(f"{book.prefix}meta", "last_sweep", 1)
    assert (await book.store.sweep()).extended == 1
    expiry = await book.redis.zscore(f"{book.prefix}running:train", "s")
    seconds, _ = await book.redis.time()
    assert 3_500 < expiry / 1000 - seconds < 3_700


async def test_session_when_no_worker_could_hear_its_agent_then_it_does_not_expire(book, sessions):
    await sessions.open("s")
    await book.submit("row")
    await book.lease(1)
    await book.redis.hset(f"{book.prefix}meta", "heard", 1)
    for task_id in ("s", "row"):
        await book.expire_lease(task_id)
    assert await book.counts() == {"running": 1, "queued": 1}
    assert await book.state("s") == "running"
    await book.lease(1)  # a worker is back: from now on its agent has all of its time
    await book.store.sweep()
    assert await book.state("s") == "running"
    await book.expire_lease("s")
    assert await book.state("s") == "expired"


async def test_session_when_all_attempts_have_ended_then_completed_and_trained_once(book, sessions):
    await book.register(size=1)
    await sessions.open("s", keys=KEYS)
    await sessions.record("s", await sessions.begin("s", 1), 2)
    assert await sessions.end("s") == 1
    assert await sessions.end("s") == 1
    with pytest.raises(LeaseLost, match="session s-0 has ended"):
        await sessions.begin("s", 1)
    assert await sessions.end("s", 1) == 0
    token = await sessions.token("s")
    assert await book.complete("s", token)
    assert not await book.complete("s", token)
    assert await sessions.end("s") == 0
    assert await book.held() == await book.recount()
    assert await book.take(1) == ("taken", ["s"])
    await book.store.commit(book.incarnation, 1, 1)
    assert await book.counts() == {"trained": 1}


async def test_session_when_opened_again_after_its_step_was_released_then_it_has_its_version(
    book, sessions
):
    await book.register(size=1)
    await book.run("t")
    assert await book.take(1) == ("taken", ["t"])
    await book.store.commit(book.incarnation, 1, 0)
    assert await book.take(2) == ("waiting", [])
    opened = (await sessions.open("s")).policy_version
    assert opened == 1
    await sessions.end("s")
    assert await book.complete("s", await sessions.token("s"), opened)
    assert await book.take(2) == ("taken", ["s"])
    await book.store.commit(book.incarnation, 2, 2)
    assert (await sessions.open("s")).policy_version == opened


async def test_session_when_it_is_too_stale_then_it_expires_and_is_not_queued(book, sessions):
    await book.register(size=1, eta=1)
    await sessions.open("first")
    await sessions.open("late")
    assert await book.complete("first", await sessions.token("first"))
    assert await book.take(1) == ("taken", ["first"])
    assert (await book.take(2))[0] == "waiting"
    await sessions.open("fresh")
    assert await book.complete("fresh", await sessions.token("fresh"), version=1)
    assert (await book.take(2))[0] == "waiting"  # for the late one
    await book.pass_straggler_deadline()
    assert await book.take(2) == ("taken", ["fresh"])
    assert await book.state("late") == "expired"
    assert await book.lease(5) == {}
    assert await book.held() == await book.recount()


async def test_session_when_its_group_is_too_stale_then_it_expires_and_is_not_queued(
    book, sessions
):
    await book.register(size=1, eta=1)
    for task_id in ("first", "second"):
        await sessions.open(task_id)
        assert await book.complete(task_id, await sessions.token(task_id))
    assert await book.take(1) == ("taken", ["first"])
    await book.register(1, size=1, eta=0)
    assert (await book.take(2))[0] == "waiting"
    assert await book.counts() == {"batched": 1, "expired": 1}
    assert (await sessions.store.read("second", 0)).record.reason.startswith("head version 0")
    assert await book.held() == await book.recount()


async def test_session_when_it_is_cancelled_or_returned_then_nothing_of_it_is_left(book, sessions):
    for task_id in ("c", "r"):
        await sessions.open(task_id)
        await sessions.begin(task_id, 1, 2, 3)
    await book.store.cancel(["c"], None, reason="enough", incarnation=0)
    returned = await book.return_lease("r", await sessions.token("r"), "workflow_error")
    assert (await book.state("c"), returned) == ("cancelled", "expired")
    assert not await book.redis.keys(f"{book.prefix}calls:*")
    assert await book.held() == await book.recount()


async def test_calls_when_they_are_too_large_then_refused_in_one_line(book, sessions):
    await sessions.open("s")
    sessions.memory.limit_bytes = FULL
    with pytest.raises(CapacityExceeded, match="memory limit; try again"):
        await sessions.begin("s", 1)
    sessions.memory.limit_bytes = EMPTY
    with pytest.raises(InvalidInput, match=r"its calls have \d+ bytes: at most 1000000"):
        await sessions.begin("s", *range(2**20, 2**20 + 400_000))

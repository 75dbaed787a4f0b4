"""Random interleavings of everything, the real scripts against the model in ledger_model.py."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.contract.ledger_model import Model, T
from tests.ledger_support import (
    EMPTY,
    FULL,
    Book,
    complete,
    finished,
    ledger_config,
    new_task,
    open_book,
    return_lease,
    returned,
)

from areal.chassis.waits import Waits
from areal.errors import ArealError
from areal.protocol.trajectories import unpack_group
from areal.types import Purpose
from areal.v1 import buffer_service_pb2 as pb
from areal.weights.manifest import PolicyVersion
from areal_buffer.records import MemoryGauge, NewTask
from areal_buffer.sessions import SessionStore
from areal_weight_sync.store.redis import RedisStore

IDS = [f"t{i}" for i in range(24)] + [f"s{i}" for i in range(6)]
STEPS = int(os.environ.get("LEDGER_MODEL_STEPS", "60"))
LONG = [pytest.mark.long, pytest.mark.timeout(1800)]
EXAMPLES = [40, pytest.param(int(os.environ.get("LEDGER_MODEL_EXAMPLES", "400")), marks=LONG)]

IDLE_MS = 7 * 24 * 3600 * 1000
ENDS = ("delivered", "rejected", "cancelled", "expired")

task_ids = st.sampled_from(IDS)
flags = st.booleans()
seldom = st.integers(0, 9).map(lambda n: n == 0)


def purpose_of(task_id: str) -> Purpose:
    return Purpose.SERVE if task_id.startswith("s") else Purpose.TRAIN


def attempts_of(task_id: str) -> int:
    """Of a session of this name."""
    return 1 + IDS.index(task_id) % 2


def outcome(call: Callable[[], Any]) -> Any:
    """The result, or the class of the error."""
    try:
        return call()
    except ArealError as error:
        return type(error)


class LedgerMachine(RuleBasedStateMachine):
    url = ""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.opened = open_book(
            self.url,
            batch_size=2,
            max_head_offpolicyness=1,
            max_concurrent_rollouts=100,
            straggler_deadline_ms=10**9,
            # Only rules let time pass, however slow the machine is.
            lease_ttl_ms=IDLE_MS,
            sweep_interval_ms=10**9,
            serve_result_ttl_ms=10**9,
        )
        self.book: Book = self.runner.run(self.opened.__aenter__())
        self.store = self.book.store
        self.versions = RedisStore(self.book.redis, self.book.namespace, 3600.0, Waits())
        self.run(self.versions.acquire())
        self.model = Model(2, 1, 100)
        config = ledger_config("", namespace=self.book.namespace)
        self.memory = MemoryGauge(EMPTY)
        self.sessions = SessionStore(self.book.redis, config, self.memory, Waits())
        self.issued: list[tuple[str, int]] = []
        self.late: list[tuple[str, int]] = []
        self.agreed = False

    def run(self, awaitable: Awaitable[Any]) -> Any:
        async def waited() -> Any:
            return await awaitable

        return self.runner.run(waited())

    def same(self, expected: Callable[[], Any], awaitable: Awaitable[Any]) -> Any:
        """Both give the same result or the same class of error."""
        self.agreed = False
        got = outcome(lambda: self.run(awaitable))
        wanted = outcome(expected)
        assert got == wanted, f"ledger: {got}, model: {wanted}"
        self.agreed = True
        return got

    def teardown(self) -> None:
        try:
            if self.agreed:
                self.drain()
        finally:
            self.runner.run(self.opened.__aexit__(None, None, None))
            self.runner.close()

    # -- rules --------------------------------------------------------------------------------

    @initialize(size=st.integers(1, 3), eta=st.integers(0, 2), concurrent=st.integers(1, 8))
    def first_trainer(self, size: int, eta: int, concurrent: int) -> None:
        self.register(0, size, eta, concurrent)
        self.submit(IDS[:12], False, False, False)

    @rule(times=st.integers(1, 3))
    def progress(self, times: int) -> None:
        """What a healthy run does, so that interleavings also reach later steps."""
        for _ in range(times):
            self.lease(6)
            self.complete_all()
            self.take_step(self.model.last + 1, [], False, False)

    @rule()
    def lease_and_go_silent(self) -> None:
        """The lease is kept by a worker that answers, if ever, much later."""
        self.lease(2)
        self.late = [*self.late, *self.issued[-2:]]

    @precondition(lambda self: self.late)
    @rule(newer=st.integers(0, 1), at=st.integers(0, 20))
    def answer_late(self, newer: int, at: int) -> None:
        task_id, token = self.late[at % len(self.late)]
        known = self.model.tasks.get(task_id)
        head = (known.floor if known else 0) + newer
        self.same(
            lambda: self.model.complete(task_id, token, head, False),
            complete(self.store, token, finished(task_id, head)),
        )

    def register(self, resume: int, size: int, eta: int, concurrent: int) -> None:
        async def call() -> tuple[int, int, int]:
            trainer = await self.store.register_trainer(resume, size, eta, concurrent)
            return trainer.incarnation, trainer.last_taken_step, trainer.last_committed_step

        self.same(lambda: self.model.register(resume, size, eta, concurrent), call())

    @rule(
        ids=st.lists(task_ids, min_size=1, max_size=8), positioned=flags, seal=seldom, full=seldom
    )
    def submit(self, ids: list[str], positioned: bool, seal: bool, full: bool) -> None:
        positions = {i: (0, IDS.index(i) // 2) if positioned else None for i in ids}
        items = [(i, purpose_of(i).value, positions[i]) for i in ids]
        tasks = [new_task(i, purpose_of(i), position=positions[i]) for i in ids]
        self.same(
            lambda: self.model.submit(items, 0, seal, full),
            self.store.submit(tasks, incarnation=0, seal=seal, limit=FULL if full else EMPTY),
        )

    @rule(most=st.integers(1, 6), worker=st.sampled_from(["w", "named"]), boot=st.integers(1, 6))
    def lease(self, most: int, worker: str = "w", boot: int = 0) -> None:
        """A named worker tells its life; now and then it is an older or a newer one."""
        boot = boot if worker == "named" else 0

        async def call() -> list[tuple[str, int, int, bytes, int]]:
            found = await self.store.lease(worker, most, boot)
            assert bool(found.leases) != bool(found.reason)
            return [
                (x.task.task_id, x.token, x.policy_version, x.partial, x.attempts)
                for x in found.leases
            ]

        before = len(self.model.having("running"))
        room = self.model.headroom()
        given = self.same(lambda: self.model.lease(most, worker, boot), call())
        if isinstance(given, type):
            return
        self.issued += [(each[0], each[1]) for each in given]
        taken = [i for i, *_ in given if self.model.tasks[i].purpose == "train"]
        wanted = [i for i in taken if self.model.tasks[i].want == self.model.want != ""]
        released = before + len(taken) - len(self.model.having("running"))
        assert len(taken) - len(wanted) <= max(0, room + released)  # L4

    @rule(task_id=task_ids, full=seldom)
    def open_session(self, task_id: str, full: bool) -> None:
        purpose = purpose_of(task_id)
        self.memory.limit_bytes = FULL if full else EMPTY
        known, room = self.model.tasks.get(task_id), self.model.headroom()
        version = self.same(
            lambda: self.model.open(task_id, purpose.value, attempts_of(task_id), full),
            self.opened_version(new_task(task_id, purpose)),
        )
        if known is None and not isinstance(version, type):
            assert room > 0 or purpose is Purpose.SERVE  # L4
            self.issued.append((task_id, self.model.token))

    async def opened_version(self, task: NewTask) -> int:
        keys = ["a" * 64] * attempts_of(task.task_id)
        return (await self.sessions.open(task, keys, IDLE_MS, b"")).policy_version

    @rule()
    def refused_agents_stay_away(self) -> None:
        self.model.lapse()
        self.run(self.book.pass_kept_places())

    @precondition(lambda self: any(t.attempts for t in self.model.tasks.values()))
    @rule(
        at=st.integers(0, 5),
        older=seldom,
        attempt=st.integers(0, 1),
        what=st.sampled_from(["begin", "begin", "record", "reward", "end"]),
    )
    def update_session(self, at: int, older: bool, attempt: int, what: str) -> None:
        sessions = [t for t in self.model.tasks.values() if t.attempts]
        task = sessions[-1 - at % len(sessions)]
        self.change_session(task, max(1, task.token - older), attempt, what)

    @rule(task_id=st.sampled_from(IDS[1::2]), most=st.integers(0, 6))
    def agents_fall_silent(self, task_id: str, most: int) -> None:
        """One of two attempts has ended; then a worker may get the task, among others."""
        self.open_session(task_id, False)
        task = self.model.tasks.get(task_id)
        if task and task.attempts and task.state == "running":
            self.change_session(task, task.token, 0, "begin")
            self.change_session(task, task.token, 0, "end")
            self.expire_task(task_id)
            if most:
                self.lease(most)

    def change_session(self, task: T, token: int, attempt: int, what: str) -> None:
        lease = pb.LeaseRef(task_id=task.id, token=token)
        request = pb.UpdateSessionRequest(lease=lease, attempt=attempt)
        if what == "begin":
            prompt = pb.SessionPrompt(token_ids=[1, 2], call_id=f"c{task.calls[attempt]}")
            change = pb.SessionBegin(answers=1, prompt=prompt)
            request.begin.CopyFrom(change)
        elif what == "record":
            request.record.answer.token_ids.append(3)
            request.record.call_id = "c0"
        elif what == "reward":
            request.reward.value = 0.5
        else:
            request.end.SetInParent()
        self.memory.limit_bytes = EMPTY

        async def call() -> tuple[int, int]:
            done = await self.sessions.update(request)
            return done.number, done.open_attempts

        self.same(lambda: self.model.update(task.id, token, attempt, what), call())

    def lease_at(self, at: int) -> tuple[str, int]:
        return self.issued[-1 - at % len(self.issued)]

    @precondition(lambda self: self.issued)
    @rule(at=st.integers(0, 7), newer=st.integers(0, 2), full=seldom)
    def complete(self, at: int, newer: int, full: bool) -> None:
        task_id, token = self.lease_at(at)
        head = max(0, self.model.v - 1 + newer)
        self.same(
            lambda: self.model.complete(task_id, token, head, full),
            complete(self.store, token, finished(task_id, head), limit=FULL if full else EMPTY),
        )

    @precondition(lambda self: self.issued)
    @rule()
    def complete_all(self) -> None:
        for task_id, token in self.issued[-6:]:
            task = self.model.tasks.get(task_id)
            if task and task.state == "running" and (task_id, token) not in self.late:
                head = max(self.model.v, task.floor)
                self.same(
                    lambda i=task_id, t=token, h=head: self.model.complete(i, t, h, False),
                    complete(self.store, token, finished(task_id, head)),
                )

    @precondition(lambda self: self.issued)
    @rule(at=st.integers(0, 4))
    def reject(self, at: int) -> None:
        task_id, token = self.lease_at(at)
        group = finished(task_id, 0).payload
        self.same(
            lambda: self.model.reject(task_id, token),
            self.store.reject(task_id, token, "no", group),
        )

    @precondition(lambda self: self.issued)
    @rule(
        at=st.integers(0, 4),
        cause=st.sampled_from(["drain", "workflow_error", "infrastructure"]),
        partial=st.sampled_from([b"", b"journal", b"a longer journal"]),
        full=seldom,
    )
    def return_lease(self, at: int, cause: str, partial: bytes, full: bool) -> None:
        task_id, token = self.lease_at(at)
        lease = returned(task_id, token, cause, partial)
        self.same(
            lambda: self.model.return_lease(task_id, token, cause, partial, full),
            return_lease(self.store, lease, limit=FULL if full else EMPTY),
        )

    @precondition(lambda self: self.issued)
    @rule(ats=st.lists(st.integers(0, 20), min_size=1, max_size=4, unique=True))
    def renew(self, ats: list[int]) -> None:
        leases = list(dict.fromkeys(self.lease_at(at) for at in ats))
        self.same(lambda: self.model.renew(leases), self.store.renew("w", leases))

    @precondition(lambda self: self.issued)
    @rule(at=st.integers(0, 4))
    def expire(self, at: int) -> None:
        self.expire_task(self.lease_at(at)[0])

    def expire_task(self, task_id: str) -> None:
        self.model.expire_leases([task_id])
        self.model.make_room()  # the sweep releases what is old, whether or not room is needed
        self.run(self.book.expire_lease(task_id))

    @rule(
        offset=st.sampled_from([1, 1, 1, 1, 0, -1, -2, 2]),
        near=seldom,
        old=seldom,
        refill=st.integers(0, 8),
        behind=flags,
    )
    def take(self, offset: int, near: bool, old: bool, refill: int, behind: bool) -> None:
        """`behind`: the version of the step before is on its way to the servers."""
        self.take_step(max(1, self.model.last + offset), [], near, old, refill, behind)

    @rule(ahead=st.integers(-1, 1), old=seldom)
    def confirm(self, ahead: int, old: bool) -> None:
        """A server serves it now."""
        version, incarnation = max(0, self.model.v + ahead), self.model.incarnation - old
        self.same(
            lambda: self.model.confirm(incarnation, version),
            self.store.confirm(incarnation, version),
        )

    @rule(ids=st.lists(task_ids, min_size=1, max_size=4, unique=True))
    def take_named(self, ids: list[str]) -> None:
        ends = ("trained", "batched", "rejected", "cancelled")
        known = [i for i in ids if i in self.model.tasks and purpose_of(i) is Purpose.TRAIN]
        if any(self.model.tasks[i].state not in ends for i in known):
            self.take_step(self.model.last + 1, known, False, False)

    def take_step(
        self,
        step: int,
        ids: list[str],
        near: bool,
        old: bool,
        refill: int = 0,
        behind: bool = False,
    ) -> Any:
        incarnation = self.model.incarnation - old
        confirmed = max(0, step - 2) if behind else None

        async def call() -> tuple[str, list[str], bool]:
            take = await self.store.take(
                incarnation,
                step,
                ids,
                limit=FULL if near else EMPTY,
                refill_below=refill,
                confirmed=confirmed,
            )
            if take.state == "taken":
                assert [group.task_id async for group in self.groups(take, step)]
            few = take.queued < refill and not self.model.sealed
            assert take.rows_wanted == (take.state == "waiting" and few)
            return take.state, [group.task_id for group in take.groups], take.replay

        train, serve = self.run(self.book.held())
        spare = int(self.run(self.book.redis.hget(f"{self.book.prefix}meta", "bytes:spare")) or 0)
        helps = train - spare >= serve  # what a commit would release is most of it
        return self.same(
            lambda: self.model.take(incarnation, step, ids, near, helps, confirmed), call()
        )

    async def groups(self, take: Any, step: int) -> Any:
        """The groups of a batch, each with its payload still there and as it was completed."""
        ids = [group.task_id for group in take.groups]
        fetched = self.store.fetch(self.model.incarnation, step, ids)
        payloads = [each async for some in fetched for each in some]
        for group, payload in zip(take.groups, payloads, strict=True):
            assert payload == finished(group.task_id, group.head_version).payload
            assert step - 1 - group.head_version <= self.model.eta or take.replay  # L5
            yield group

    @precondition(lambda self: self.model.take_step == self.model.last + 1)
    @rule()
    def straggler_deadline(self) -> None:
        self.model.late = True
        self.run(self.book.pass_straggler_deadline())

    @rule(back=st.integers(-1, 3), kept=st.integers(0, 4), old=seldom)
    def commit(self, back: int, kept: int, old: bool) -> None:
        step = max(0, self.model.last - back)
        retained = max(0, step - kept)
        incarnation = self.model.incarnation - old
        self.same(
            lambda: self.model.commit(incarnation, step, retained),
            self.store.commit(incarnation, step, retained),
        )

    @rule(
        back=st.integers(-1, 4),
        size=st.integers(1, 3),
        eta=st.integers(0, 2),
        concurrent=st.integers(1, 8),
    )
    def restart_trainer(self, back: int, size: int, eta: int, concurrent: int) -> None:
        # The bound may not shrink within a run: groups taken under the old one are replayed.
        self.register(max(0, self.model.last - back), size, max(eta, self.model.eta), concurrent)

    @rule(offset=st.integers(-3, 2), old=seldom)
    def fetch_discarded(self, offset: int, old: bool) -> None:
        """Once each, with the step whose batch came next; groups are whole, or were released."""
        incarnation, step = self.model.incarnation - old, max(1, self.model.last + offset)

        async def call() -> list[tuple[str, int, str]]:
            total, found = await self.store.discarded(incarnation, step, 0)
            assert total == len(found)
            for each in found:
                assert not each.group or unpack_group(each.group).task_id == each.task_id
            return sorted((each.task_id, each.token, each.outcome) for each in found)

        self.same(lambda: self.model.fetch_discarded(incarnation, step), call())

    @rule(ahead=st.integers(-2, 1), old=seldom)
    def publish(self, ahead: int, old: bool) -> None:
        """The trainer publishes the weights of a step; fenced by the ledger's incarnation."""
        version = max(0, self.model.published[0] + ahead)
        incarnation = max(1, self.model.incarnation - old)
        before = self.model.published
        policy = PolicyVersion(version=version, incarnation=incarnation, path=f"/v{version}")

        async def call() -> str:
            await self.versions.publish(policy)
            return "again" if before == (version, incarnation) else "new"

        self.same(lambda: self.model.publish(version, incarnation), call())
        stored = self.run(self.versions.load()).current
        now = (stored.version, stored.incarnation) if stored else (-1, 0)
        assert now == self.model.published

    @rule(ids=st.lists(task_ids, min_size=1, max_size=2, unique=True))
    def cancel(self, ids: list[str]) -> None:
        self.same(
            lambda: self.model.cancel(ids),
            self.store.cancel(ids, None, reason="", incarnation=0),
        )

    @precondition(lambda self: self.model.counts("train", "serve")["dead_lettered"])
    @rule(ids=st.lists(task_ids, max_size=4, unique=True))
    def retry(self, ids: list[str]) -> None:
        self.same(lambda: self.model.retry(ids), self.store.retry_dead_letters(ids))

    @precondition(lambda self: self.model.counts("train", "serve")["dead_lettered"])
    @rule(ids=st.lists(task_ids, min_size=1, max_size=3, unique=True))
    def drop(self, ids: list[str]) -> None:
        self.same(lambda: self.model.drop(ids), self.store.drop_dead_letters(ids))

    @rule(ids=st.lists(st.sampled_from(IDS[-6:]), min_size=1, max_size=6, unique=True))
    def read_results(self, ids: list[str]) -> None:
        self.model.mark_read(ids)
        self.run(self.store.mark_read(ids))

    @rule(ended=flags, full=flags)
    def time_passes(self, ended: bool, full: bool) -> None:
        """Results were read long enough ago to be released for room, or tasks ended so."""
        for task in self.model.tasks.values():
            task.read = 2 if task.read == 1 else task.read
            task.old |= ended and task.state in ENDS
            task.old |= ended and task.dropped
        self.run(self.book.pass_time("read", *["results"] * ended))
        if full:
            self.submit(["s0"], False, False, True)

    # -- what always holds ----------------------------------------------------------------------

    @invariant()
    def counters_agree(self) -> None:
        stats = self.run(self.store.stats())
        both = {state.value: n for state, n in stats.counts.items() if n}
        train = {state.value: n for state, n in stats.train_counts.items() if n}
        assert both == dict(self.model.counts("train", "serve"))
        assert train == dict(self.model.counts("train"))
        assert stats.submitted == sum(both.values())  # L1
        assert stats.staleness_max == max([0, *self.model.staleness])
        assert stats.admission_headroom == self.model.headroom()
        assert (stats.policy_version, stats.last_taken_step, stats.last_committed_step) == (
            self.model.v,
            self.model.last,
            self.model.committed,
        )

    @invariant()
    def bytes_agree(self) -> None:
        assert self.run(self.book.held()) == self.run(self.book.recount())

    def drain(self) -> None:
        """Nothing starves: sealed, with workers that answer, every task ends and batches stop."""
        self.same(
            lambda: self.model.submit([], 0, True, False),
            self.store.submit([], incarnation=0, seal=True, limit=EMPTY),
        )
        self.late = []
        self.refused_agents_stay_away()
        for _ in range(300):
            for task in self.model.having("running") + self.model.having("running", "serve"):
                self.issued.append((task.id, task.token))
                self.complete_all()
            self.lease(6)
            self.complete_all()
            state, _, _ = self.take_step(self.model.last + 1, [], False, False)
            if state == "exhausted":
                break
            self.counters_agree()
        assert state == "exhausted"
        left = self.model.having("queued", "serve") + self.model.having("running", "serve")
        while left:
            self.lease(6)
            self.complete_all()
            left = self.model.having("queued", "serve") + self.model.having("running", "serve")
        if self.model.last:
            self.same(
                lambda: self.model.commit(self.model.incarnation, self.model.last, 0),
                self.store.commit(self.model.incarnation, self.model.last, 0),
            )
        self.counters_agree()
        assert not {"queued", "running", "completed", "batched"} & set(
            self.model.counts("train", "serve")
        )
        trained = [i for batch in self.model.batches.values() for i in batch]
        assert len(trained) == len(set(trained))  # L2


@pytest.mark.parametrize("examples", EXAMPLES)
def test_ledger_when_anything_interleaves_then_equals_the_model(
    redis_process: str, examples: int
) -> None:
    LedgerMachine.url = redis_process
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            # Shrinking can take many minutes; LEDGER_MODEL_SHRINK=1 when looking into a failure.
            phases=[Phase.generate] + [Phase.shrink] * ("LEDGER_MODEL_SHRINK" in os.environ),
            suppress_health_check=list(HealthCheck),
        ),
    )

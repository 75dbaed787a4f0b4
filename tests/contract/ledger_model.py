"""The ledger in plain Python: what the Lua scripts are compared with."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from areal.errors import (
    CapacityExceeded,
    InvalidInput,
    LeaseLost,
    NotFound,
    StaleIncarnation,
    WorkflowError,
    WrongStep,
)

MAX_ATTEMPTS, MAX_INFRA, MAX_REGENERATIONS = 2, 3, 3


@dataclass
class T:
    id: str
    purpose: str
    seq: int
    state: str = "queued"
    token: int = 0
    done: int = 0
    floor: int = 0
    head: int = 0
    errors: int = 0
    infra: int = 0
    regen: int = 0
    partial: bytes = b""
    revoked: bool = False
    dropped: bool = False
    want: str = ""
    worker: str = ""
    old: bool = False
    """It ended so long ago that it may be released for room."""
    attempts: int = 0
    """Of a session; 0: it is none."""
    ended: set[int] = field(default_factory=set)
    silent: bool = False
    """The agents of the other attempts were: workers make its group."""
    calls: list[int] = field(default_factory=lambda: [0, 0])
    read: int = 0
    """1: its result has been read; 2: so long ago that it may be released; 3: it was."""


class Model:
    def __init__(self, size: int, eta: int, concurrent: int) -> None:
        self.size, self.eta, self.concurrent = size, eta, concurrent
        self.tasks: dict[str, T] = {}
        self.gone: Counter[str] = Counter()
        self.seq = 0
        self.seen: set[tuple[int, int]] = set()
        self.v = self.last = self.committed = self.let_go = self.incarnation = self.token = 0
        self.sealed = self.late = False
        self.want, self.take_step, self.serve_turn = "", 0, True
        self.batches: dict[int, list[str]] = {}
        self.batch_incarnation: dict[int, int] = {}
        self.staleness: list[int] = []
        self.published = (-1, 0)
        self.boots: dict[str, int] = {}
        self.discarded: dict[int, list[tuple[str, int, str]]] = {}
        """By step what ended untrained before its batch; under 0 what did since the last."""
        self.kept = {"train": 0, "serve": 0}
        """1: a place is kept for the next session; -1: a session had the last place."""

    def having(self, state: str, purpose: str = "train") -> list[T]:
        found = [t for t in self.tasks.values() if t.state == state and t.purpose == purpose]
        return sorted(found, key=lambda t: (t.head, t.seq) if state == "completed" else t.seq)

    def counts(self, *purposes: str) -> Counter[str]:
        found = Counter(t.state for t in self.tasks.values() if t.purpose in purposes)
        return found + self.gone if "serve" in purposes else found

    def fence(self, incarnation: int) -> None:
        if incarnation != self.incarnation:
            raise StaleIncarnation

    def headroom(self) -> int:
        ahead = sum(len(self.batches[s]) for s in range(self.v + 1, self.last + 1))
        used = len(self.having("running")) + len(self.having("completed")) + ahead
        return (self.eta + 1) * self.size - used

    def submit(
        self,
        items: list[tuple[str, str, tuple[int, int] | None]],
        incarnation: int,
        seal: bool,
        full: bool,
    ) -> list[bool]:
        if incarnation:
            self.fence(incarnation)
        flags, train = [], False
        for task_id, purpose, position in items:
            known = task_id in self.tasks and self.tasks[task_id].read != 3
            known |= purpose == "train" and position in self.seen
            if not known:
                if full:
                    self.make_room()
                enough = len(self.having("queued")) >= (self.eta + 1) * self.size
                if full and (purpose == "serve" or enough):
                    raise CapacityExceeded
                self.seq += 1
                again = self.tasks.get(task_id)
                # The ledger's own record of it stays: it is one task that is run twice.
                self.tasks[task_id] = T(
                    task_id,
                    purpose,
                    self.seq,
                    token=again.token if again else 0,
                    done=again.done if again else 0,
                )
                train |= purpose == "train"
                if purpose == "train" and position:
                    self.seen.add(position)
            flags.append(not known)
        self.sealed = seal or (self.sealed and not train)
        return flags

    def make_room(self) -> None:
        """Results go that were read, then all that ended long ago."""
        for task in list(self.tasks.values()):
            if task.purpose == "serve" and task.read == 2:
                task.read = 3
            if task.old and task.purpose == "serve":
                self.gone[task.state] += 1
                del self.tasks[task.id]

    def mark_read(self, ids: list[str]) -> None:
        for task_id in ids:
            task = self.tasks.get(task_id)
            if task and task.state == "delivered" and not task.read:
                task.read = 1

    def serve_room(self) -> int:
        kept = min(self.concurrent // 2, (self.eta + 1) * self.size) if self.incarnation else 0
        most = self.concurrent - kept
        most = max(1, most - -(-most // 4)) if self.incarnation else most
        return most - len(self.having("running", "serve"))

    def begin_life(self, worker: str, boot: int) -> None:
        known = self.boots.get(worker, 0)
        if boot < known:
            raise LeaseLost
        self.boots[worker] = boot
        if 0 < known < boot:
            for task in self.having("running") + self.having("running", "serve"):
                if task.worker == worker:
                    task.revoked = True
                    self.end_attempt(task, "infrastructure")

    def lease(
        self, most: int, worker: str = "w", boot: int = 0
    ) -> list[tuple[str, int, int, bytes, int]]:
        if boot:
            self.begin_life(worker, boot)
        given: list[tuple[str, int, int, bytes, int]] = []
        running = self.having("running") + self.having("running", "serve")
        slots, headroom = self.concurrent - len(running), self.headroom()
        turn, serve_room = self.serve_turn, self.serve_room()
        kept_train, kept_serve = self.kept["train"] == 1, self.kept["serve"] == 1
        headroom, serve_room = headroom - kept_train, serve_room - kept_serve
        while len(given) < most and slots > 0:
            queued = self.having("queued")
            wanted = [t for t in queued if self.want and t.want == self.want]
            spare = slots > kept_train + kept_serve
            others = [t for t in queued if t not in wanted] if headroom > 0 and spare else []
            train = next(iter(wanted + others), None)
            clients = self.having("queued", "serve") if serve_room > 0 and spare else []
            serve = next(iter(clients), None)
            pick = serve if serve and (turn or not train) else train
            if not pick:
                break
            turn, slots = pick.purpose == "train", slots - 1
            if pick not in wanted:
                self.kept[pick.purpose] = max(0, self.kept[pick.purpose])
            headroom -= pick.purpose == "train"
            serve_room -= pick.purpose == "serve"
            if pick.purpose == "train" and max(self.v, self.last) - pick.floor > self.eta:
                pick.partial = b""
            if not pick.partial and not pick.attempts:
                pick.floor = self.v
            self.token += 1
            pick.token, pick.revoked, pick.state = self.token, False, "running"
            pick.worker = worker
            given.append((pick.id, self.token, self.v, pick.partial, pick.attempts))
        if given:
            self.serve_turn = turn
        return given

    def find(self, task_id: str) -> T:
        if task_id not in self.tasks:
            raise NotFound
        return self.tasks[task_id]

    def check(self, task: T, token: int) -> None:
        spent = token != task.token or token == task.done
        if spent or task.state not in ("running", "queued"):
            raise LeaseLost

    def complete(self, task_id: str, token: int, head: int, full: bool) -> bool:
        task = self.find(task_id)
        if token == task.done:
            return False
        self.check(task, token)
        if task.purpose == "train" and head < task.floor:
            raise InvalidInput
        if full:
            self.make_room()
            needed = task.floor <= self.last - self.eta or len(self.having("completed")) < self.size
            if task.purpose == "serve" or not needed:
                raise CapacityExceeded
        task.head, task.done, task.partial = head, token, b""
        task.state = "completed" if task.purpose == "train" else "delivered"
        return True

    def discard(self, task: T, outcome: str) -> None:
        if task.purpose == "train":
            self.discarded.setdefault(0, []).append((task.id, task.token, outcome))

    def fetch_discarded(self, incarnation: int, step: int) -> list[tuple[str, int, str]]:
        self.fence(incarnation)
        if step <= self.let_go:
            raise WrongStep
        key = step if step <= self.last else 0 if step == self.last + 1 else -1
        return sorted(self.discarded.get(key, []))

    def reject(self, task_id: str, token: int) -> None:
        task = self.find(task_id)
        if task.state == "rejected" and task.token == token:
            return
        self.check(task, token)
        task.state = "rejected"
        self.discard(task, "rejected")

    def open(self, task_id: str, purpose: str, attempts: int, full: bool) -> int:
        if known := self.tasks.get(task_id):
            if not known.attempts:
                raise InvalidInput
            return known.floor
        running = self.having("running") + self.having("running", "serve")
        room = self.serve_room() if purpose == "serve" else self.headroom()
        if room <= 0 or len(running) >= self.concurrent:
            self.kept[purpose] = self.kept[purpose] or 1
            raise CapacityExceeded
        if full:
            self.make_room()
            raise CapacityExceeded
        self.kept[purpose] = -1
        self.seq += 1
        self.token += 1
        task = T(task_id, purpose, self.seq, "running", self.token, floor=self.v)
        task.attempts = attempts
        self.tasks[task_id] = task
        return self.v

    def lapse(self) -> None:
        self.kept = {purpose: min(0, kept) for purpose, kept in self.kept.items()}

    def update(self, task_id: str, token: int, attempt: int, what: str) -> tuple[int, int]:
        task = self.find(task_id)
        if attempt >= task.attempts:
            raise NotFound
        if what == "end" and task.done == token:
            return 0, 0
        if task.state != "running" or task.token != token:
            raise LeaseLost
        if task.silent and not (what == "end" and attempt in task.ended):
            raise LeaseLost
        if what == "end":
            task.ended.add(attempt)
        elif attempt in task.ended:
            raise LeaseLost
        number = 0
        if what == "begin":
            number = task.calls[attempt]
            task.calls[attempt] += 1
        elif what == "record" and not task.calls[attempt]:
            raise NotFound
        return number, task.attempts - len(task.ended)

    def end_attempt(self, task: T, cause: str) -> None:
        if task.attempts:
            again = cause == "drain"
            if cause == "infrastructure" and task.ended:
                task.infra += 1
                again = task.infra < MAX_INFRA
            if again and task.ended:
                task.state, task.silent, task.revoked = "queued", True, True
                return
            task.state = "expired"
            self.discard(task, "expired")
            return
        task.errors += cause == "workflow_error"
        task.infra += cause == "infrastructure"
        task.regen += cause == "too_stale"
        dead = {
            "workflow_error": task.errors >= MAX_ATTEMPTS,
            "infrastructure": task.infra >= MAX_INFRA,
            "too_stale": task.regen > MAX_REGENERATIONS,
        }.get(cause, False)
        if dead or task.state == "completed":
            self.discard(task, "dead_lettered" if dead else "too_stale")
        task.state = "dead_lettered" if dead else "queued"
        if dead:
            task.partial = b""

    def return_lease(self, task_id: str, token: int, cause: str, partial: bytes, full: bool) -> str:
        task = self.find(task_id)
        if task.state == "dead_lettered" and token == task.token:
            return task.state
        self.check(task, token)
        partial = b"" if full or task.attempts else partial
        if task.state == "queued":
            task.partial = partial or task.partial
            return task.state
        task.partial = partial
        task.revoked = True
        self.end_attempt(task, cause)
        return task.state

    def renew(self, leases: list[tuple[str, int]]) -> list[str]:
        lost = []
        for task_id, token in leases:
            task = self.tasks.get(task_id)
            if not task:
                lost.append(task_id)
                continue
            kept = task.token == token and task.state == "running"
            if task.token == token and task.state == "queued" and not task.revoked:
                running = self.having("running") + self.having("running", "serve")
                room = self.serve_room() if task.purpose == "serve" else self.headroom()
                if len(running) < self.concurrent and room > 0:
                    task.state, kept = "running", True
            if not kept:
                lost.append(task_id)
        return lost

    def take(
        self,
        incarnation: int,
        step: int,
        ids: list[str],
        near: bool,
        helps: bool,
        confirmed: int | None = None,
    ) -> tuple[str, list[str], bool]:
        self.fence(incarnation)
        if step <= self.last:
            if step <= self.let_go:
                raise WrongStep
            return "taken", self.batches[step], self.batch_incarnation[step] != incarnation
        if step != self.last + 1:
            raise WrongStep
        if self.take_step != step:
            self.take_step, self.late = step, False
        self.v = max(self.v, step - 1 if confirmed is None else min(step - 1, confirmed))
        if near and self.last > self.committed and helps:
            return "checkpoint_first", [], False
        oldest = step - 1 - self.eta
        if ids:
            return self.take_named(step, ids, oldest)
        self.want = ""
        for task in self.having("completed"):
            if task.head < oldest:
                self.end_attempt(task, "too_stale")
        if self.late:
            self.revoke(oldest - 1)
        ready = self.having("completed")
        if len(ready) < self.size:
            if not self.sealed or self.having("queued") or self.having("running"):
                return "waiting", [], False
            if not ready:
                return "exhausted", [], False
        elif any(t.floor <= oldest for t in self.having("running")):
            if not self.late:
                return "waiting", [], False
            self.revoke(oldest)
        return self.batch(step, ready[: self.size])

    def confirm(self, incarnation: int, version: int) -> int:
        self.fence(incarnation)
        if version > self.last:
            raise WrongStep
        self.v = max(self.v, version)
        return self.v

    def revoke(self, floor: int) -> None:
        for task in self.having("running"):
            if task.floor <= floor:
                task.revoked, task.partial = True, b""
                self.end_attempt(task, "too_stale")

    def take_named(self, step: int, ids: list[str], oldest: int) -> tuple[str, list[str], bool]:
        self.want = want = f"{step} {ids}"
        for task_id in ids:
            task = self.find(task_id)
            if task.purpose != "train":
                raise InvalidInput
            task.want = want
            if task.state == "completed" and task.head < oldest:
                self.end_attempt(task, "too_stale")
        tasks = [self.tasks[task_id] for task_id in ids]
        if any(t.state in ("queued", "running") for t in tasks):
            return "waiting", [], False
        ready = [t for t in tasks if t.state == "completed"]
        if not ready:
            self.want = ""
            raise WorkflowError("")
        return self.batch(step, ready)

    def batch(self, step: int, tasks: list[T]) -> tuple[str, list[str], bool]:
        self.staleness += [step - 1 - t.head for t in tasks]
        for task in tasks:
            task.state = "batched"
        self.discarded[step] = self.discarded.pop(0, [])
        self.batches[step] = [t.id for t in tasks]
        self.batch_incarnation[step] = self.incarnation
        self.last, self.want = step, ""
        return "taken", self.batches[step], False

    def commit(self, incarnation: int, step: int, retained: int) -> int:
        self.fence(incarnation)
        if step > self.last:
            raise WrongStep
        for each in range(self.committed + 1, step + 1):
            for task_id in self.batches[each]:
                self.tasks[task_id].state = "trained"
        for each in range(self.let_go + 1, retained + 1):
            for task_id in self.batches[each]:
                self.tasks[task_id].done = 0
        self.committed = max(step, self.committed)
        self.let_go = max(retained, self.let_go)
        return self.committed

    def register(self, resume: int, size: int, eta: int, concurrent: int) -> tuple[int, int, int]:
        if resume < self.let_go:
            raise WrongStep
        if resume > self.last:
            if self.tasks or self.incarnation:
                raise WrongStep
            self.v = self.last = self.committed = self.let_go = resume
        self.incarnation += 1
        self.size, self.eta, self.concurrent, self.want = size, eta, concurrent, ""
        return self.incarnation, self.last, self.committed

    def publish(self, version: int, incarnation: int) -> str:
        """PublishVersion of weight-sync, which reads the ledger's incarnation."""
        first = version == 0 and self.published[0] < 0  # no trainer made the initial weights
        if incarnation < self.incarnation and not first:
            raise StaleIncarnation
        if (version, incarnation) == self.published:
            return "again"
        # The next trainer publishes again what arrived unanswered; the initial weights have none.
        unanswered = version == self.published[0] > 0 and incarnation > self.published[1]
        if version <= self.published[0] and not unanswered:
            raise WrongStep
        self.published = (version, incarnation)
        return "new"

    def cancel(self, ids: list[str]) -> int:
        found = [self.tasks[i] for i in ids if i in self.tasks]
        live = [t for t in found if t.state in ("queued", "running", "completed")]
        for task in live:
            if task.state == "completed":
                self.discard(task, "cancelled")
            task.state = "cancelled"
        return len(live)

    def expire_leases(self, ids: list[str]) -> None:
        for task_id in ids:
            if task_id in self.tasks and self.tasks[task_id].state == "running":
                self.end_attempt(self.tasks[task_id], "infrastructure")

    def dead(self, ids: list[str]) -> list[T]:
        found = [t for t in self.tasks.values() if t.state == "dead_lettered" and not t.dropped]
        return [t for t in found if t.id in ids] if ids else found

    def retry(self, ids: list[str]) -> int:
        dead = self.dead(ids)
        for task in dead:
            task.errors = task.infra = task.regen = 0
            task.state, task.revoked = "queued", False
        return len(dead)

    def drop(self, ids: list[str]) -> int:
        dead = self.dead(ids)
        for task in dead:
            task.dropped = True
        return len(dead)

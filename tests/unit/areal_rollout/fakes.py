"""Hand-written stand-ins for what surrounds the executor."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass, field

from tests.waiting import until

from areal.errors import LeaseLost
from areal.protocol.leases import Lease
from areal.tokenizer import Tokenizer
from areal.types import (
    GenerationHyperparameters,
    LLMRequest,
    Purpose,
    StopReason,
    Task,
    WorkflowSpec,
)
from areal.workflows.base import RolloutWorkflow, make_trajectory
from areal_rollout.config import RolloutConfig
from areal_rollout.executor import Executor
from areal_rollout.generation.client import Interrupted
from areal_torch.models.tiny import CHAT_TEMPLATE, END_ID, make_byte_tokenizer


def request(prompt=(1, 2), n=6):
    return LLMRequest(list(prompt), GenerationHyperparameters(max_new_tokens=n))


async def one_sample(engine, data):
    response = await engine.agenerate(request())
    [reward] = await engine.score("math", completions=["x"], data=data)
    return make_trajectory(response, reward)


async def group_of_four(engine, data):
    responses = await asyncio.gather(*[engine.agenerate(request()) for _ in range(4)])
    rewards = await engine.score("math", completions=["x"] * 4, data=data)
    return [make_trajectory(r, w) for r, w in zip(responses, rewards, strict=True)]


def lease(task_id, token=1, version=0, workflow="rlvr", partial=b"", failed=(), **data):
    task = Task(task_id, Purpose.TRAIN, WorkflowSpec(workflow), data, traceparent="00-t-s-01")
    return Lease(task, token, version, 30.0, partial, failed)


class FakeSessions(dict):
    """The groups of sessions by task, or why there is none."""

    async def group(self, lease):
        if isinstance(found := self[lease.task.task_id], Exception):
            raise found
        return found


@dataclass
class FakeLedger:
    """Leases from a list; records every ending."""

    tasks: deque = field(default_factory=deque)
    completed: dict = field(default_factory=dict)
    rejected: dict = field(default_factory=dict)
    rejected_groups: dict = field(default_factory=dict)
    returned: dict = field(default_factory=dict)
    renewed: list = field(default_factory=list)
    lost: set = field(default_factory=set)
    calls: list = field(default_factory=list)
    errors: deque = field(default_factory=deque)
    """Raised by the next hand-ins, one each (None: none)."""
    lease_errors: deque = field(default_factory=deque)
    reason: str = "queue empty"
    added: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, *leases):
        self.tasks.extend(leases)
        self.added.set()

    async def lease_tasks(self, worker_id, max_tasks, max_wait_s, *, boot):
        self.calls.append(max_tasks)
        if self.lease_errors:
            raise self.lease_errors.popleft()
        if not self.tasks:
            self.added.clear()
            try:
                async with asyncio.timeout(max_wait_s):
                    await self.added.wait()
            except TimeoutError:
                return [], self.reason
        return [self.tasks.popleft() for _ in range(min(max_tasks, len(self.tasks)))], ""

    async def renew_leases(self, worker_id, leases):
        self.renewed.append(list(leases))
        return {task_id for task_id, _ in leases if task_id in self.lost}

    def _raise(self, task_id):
        if task_id in self.lost:
            raise LeaseLost(f"task {task_id!r}: re-leased")
        if self.errors and (error := self.errors.popleft()) is not None:
            raise error

    async def complete_task(self, task_id, token, group, worker_id):
        self._raise(task_id)
        self.completed[task_id] = group
        return True

    async def reject_task(self, task_id, token, reason, group=None):
        self._raise(task_id)
        self.rejected[task_id] = reason
        self.rejected_groups[task_id] = group

    async def return_task(self, task_id, token, end):
        self._raise(task_id)
        more = {
            name: getattr(end, name) for name in ("detail", "traceback", "failed_server", "site")
        }
        self.returned[task_id] = (end.cause, {**more, "partial": end.partial()})

    @property
    def ended(self):
        return len(self.completed) + len(self.rejected) + len(self.returned)


class FakeGeneration:
    """Gives one token per turn of the loop until `stop_at`; holds there while `hold` is set."""

    def __init__(self, version=3):
        self.version, self.error, self.ready = version, None, True
        self.requests, self.running = [], 0
        self.hold = False
        self._interrupted = asyncio.Event()

    async def wait_ready(self, timeout):
        if not self.ready:
            await asyncio.sleep(min(timeout, 0.01))
        return self.ready

    async def generate(self, request, responses, *, min_version, avoid):
        pending = [each for each in responses if each.stop_reason is StopReason.ABORT]
        await asyncio.gather(*(self._one(request, each, min_version, avoid) for each in pending))

    async def _one(self, request, response, min_version, avoid):
        self.requests.append((request, len(response.output_tokens), min_version, avoid))
        if self.error is not None:
            raise self.error
        self.running += 1
        try:
            while len(response.output_tokens) < request.gconfig.max_new_tokens:
                if self._interrupted.is_set():
                    raise Interrupted("the worker is draining")
                if self.hold and len(response.output_tokens) >= 2:
                    await self._interrupted.wait()
                    continue
                response.output_tokens.append(48 + len(response.output_tokens))
                response.output_logprobs.append(-0.25)
                response.output_versions.append(self.version)
                await asyncio.sleep(0)
        finally:
            self.running -= 1
        response.stop_reason = StopReason.LENGTH

    async def interrupt(self, timeout):
        self._interrupted.set()
        while self.running:  # noqa: ASYNC110
            await asyncio.sleep(0)


class FakeScorer:
    def __init__(self):
        self.calls, self.outcome = [], 1.0

    async def score(self, name, digest, kwargs, items):
        self.calls.append((name, digest, kwargs, items))
        return [self.outcome] * len(items)


class FakeObserver:
    def __init__(self):
        self.outcomes, self.reasons, self.tokens, self.busy_s = Counter(), Counter(), 0, 0.0
        self.drifts, self.splits = 0, []

    def conversations_split(self, trajectories):
        self.splits += [each.split for each in trajectories if each.split]

    def episode_ended(self, outcome):
        self.outcomes[outcome] += 1

    def busy(self, seconds):
        self.busy_s += seconds

    def waited(self, reason, seconds):
        self.reasons[reason] += 1

    def replayed(self, tokens):
        self.tokens += tokens

    def drifted(self):
        self.drifts += 1


class FakeWorkflows(dict):
    """Workflows by their names."""

    async def get(self, spec):
        found = self[spec.name]
        if isinstance(found, Exception):
            raise found
        return found


class Calling(RolloutWorkflow):
    """A workflow from a function of (engine, data)."""

    def __init__(self, function):
        self.function = function

    async def arun_episode(self, engine, data):
        return await self.function(engine, data)


class Unreplayable(Calling):
    replayable = False


class Rig:
    """An executor between fakes; `async with` runs it."""

    def __init__(self, function=None, workflow=Calling, generation=None, **config):
        self.ledger, self.generation = FakeLedger(), generation or FakeGeneration()
        self.scorer, self.observer = FakeScorer(), FakeObserver()
        self.workflows, self.sessions = FakeWorkflows(rlvr=workflow(function)), FakeSessions()
        self.executor = Executor(
            RolloutConfig(**{"worker_id": "w", "capacity": 64, "lease_wait_s": 0.05, **config}),
            buffer=self.ledger,
            generation=self.generation,
            scorer=self.scorer,
            workflows=self.workflows,
            tokenizer=Tokenizer(
                make_byte_tokenizer(), chat_template=CHAT_TEMPLATE, eos_token_ids=[END_ID]
            ),
            observer=self.observer,
            session_group=self.sessions.group,
        )

    async def __aenter__(self):
        self.tasks = [
            asyncio.create_task(self.executor.run()),
            asyncio.create_task(self.executor.keep_leases()),
        ]
        return self

    async def __aexit__(self, *_):
        for task in self.tasks:
            if task.done() and not task.cancelled():
                task.result()
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def ended(self, count):
        await self.until(lambda: self.ledger.ended >= count and not self.executor.running)

    async def until(self, condition):
        await until(condition, state=self._state)

    def _state(self):
        return (
            f"{self.executor.running} episodes and {self.generation.running} of their calls run, "
            f"{self.ledger.ended} tasks ended, {dict(self.observer.outcomes)}"
        )

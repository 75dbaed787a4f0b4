"""Watches a running stack from outside: one object gathers what views and summaries show.

    TrainerService.GetStatus (long poll) ──┐
    BufferService.GetStats (each second) ──┼──> StackPoller.snapshot ──> live view, summary, status
    WeightSyncService (each second) ───────┤
    the servers that it names, /v1/loads ──┘

| task    | consumes        | waits for                   | unblocked by            |
|---------|-----------------|-----------------------------|-------------------------|
| trainer | step rows       | a new row, at most 5 s      | a row, a state change   |
| ledger  | counters        | `interval_s`                | the timer               |
| weights | server states   | `interval_s`                | the timer               |

A service that is away leaves its last values and the reason in `problems`.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from areal.chassis import endless
from areal.chassis.waits import Wait
from areal.clients.buffer.connection import BufferConnection
from areal.clients.buffer.tasks import BufferTasks
from areal.clients.trainer import TrainerClient, TrainerStatus
from areal.clients.weight_sync import WeightSyncClient
from areal.config.learning_rules import Finding, of_rows
from areal.config.services import EndpointsConfig
from areal.errors import ArealError
from areal.protocol.leases import LedgerStats, WorkflowFailure
from areal.runs.step_rows import thin
from areal.security import Security
from areal.weights.servers import InferenceServer, ServerState, SyncStatus
from areal_launch.view.watchdog import ask_speed

_SPLITS_BY = "rollout/splits/"
_WINDOW_S = 15.0
_QUIET_S = 60.0
LAST_LOOK_S = 15.0
"""Deadline in seconds for the last figures before a stack ends. A busy machine may need seconds for
an answer; a service that has ended is detected at once."""


@dataclass
class Snapshot:
    """What is known of a stack now."""

    trainer: TrainerStatus | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Rows of metrics.jsonl so far, oldest first; thinned if there are many."""
    ledger: LedgerStats | None = None
    servers: list[InferenceServer] = field(default_factory=list)
    sync: SyncStatus | None = None
    samples_per_s: float | None = None
    """Samples generated per second, recently; None: a rate takes two looks."""
    tokens_per_s: float | None = None
    """Tokens of finished groups per second, recently; None likewise."""
    generating: tuple[int, float] | None = None
    """Requests that servers are processing, and tokens that they sample per second, as the servers
    report; None: no server has answered."""
    has_trainer: bool = True
    """Whether the stack has one, known or not."""
    problems: dict[str, str] = field(default_factory=dict)
    """Service -> why it did not answer; a service that answered is absent."""
    waits: dict[str, list[Wait]] = field(default_factory=dict)
    """Process -> what it waits for, the oldest first; only `areal status` asks."""

    @property
    def findings(self) -> list[Finding]:
        """Returns signs in the rows that the run cannot learn."""
        return of_rows(self.rows)

    @property
    def failures(self) -> tuple[WorkflowFailure, ...]:
        """Failures of this run; the ledger has the last run's until its trainer has registered."""
        return self.ledger.failures if self.ledger and self._is_of_this_run(self.ledger) else ()

    @property
    def retried(self) -> int:
        """Returns the number of tasks that this run's trainer queued again."""
        return self.ledger.retried if self.ledger and self._is_of_this_run(self.ledger) else 0

    @property
    def splits(self) -> str:
        """Whether agents' conversations split in the newest step; "": they do not."""
        row = self.rows[-1] if self.rows else {}
        if not row.get("rollout/splits"):
            return ""
        by_field = {
            name.removeprefix(_SPLITS_BY): count
            for name, count in row.items()
            if name.startswith(_SPLITS_BY)
        }
        changed = ""
        if by_field:
            most = max(by_field, key=by_field.__getitem__)
            at = row.get("rollout/splits_message")
            of = "" if at is None else f" of a message (the earliest is messages[{at:.0f}])"
            changed = f"since the agent changed {most}{of}; "
        return (
            f"step {row['step']}: {row['rollout/splits']:.0f} of {row['samples']} trajectories "
            "repeat the history of an earlier one instead of continuing it (rollout/splits): "
            f"{changed}areal show TASK prints what changed, see docs/agents.md"
        )

    def _is_of_this_run(self, ledger: LedgerStats) -> bool:
        return not self.has_trainer or (
            self.trainer is not None and self.trainer.incarnation == ledger.incarnation
        )


class StackPoller:
    """Owns the clients and the latest snapshot.

    Example:
        poller = StackPoller(config.endpoints)
        poller.start()
        ...
        print(poller.snapshot.rows[-1]["reward/mean"])
        await poller.close()
    """

    def __init__(
        self,
        endpoints: EndpointsConfig,
        security: Security | None = None,
        *,
        with_trainer: bool = True,
        interval_s: float = 1.0,
    ) -> None:
        self.snapshot = Snapshot(has_trainer=with_trainer)
        self._buffer = BufferConnection(endpoints.buffer, security) if endpoints.buffer else None
        self._weights = (
            WeightSyncClient(endpoints.weight_sync, security) if endpoints.weight_sync else None
        )
        self._trainer = TrainerClient(endpoints.trainer, security) if with_trainer else None
        self._interval_s = interval_s
        self._rates: deque[tuple[float, int, int]] = deque()
        self._row_listeners: list[Callable[[dict[str, Any]], None]] = []
        self._notice_listeners: list[Callable[[str], None]] = []
        self._server_listeners: list[Callable[[str], None]] = []
        self._noticed: set[str] = set()
        self._quarantined: dict[str, tuple[bool, float]] = {}
        """Server -> (whether this quarantine was reported, when the next line may be printed)."""
        self._security = security or Security()
        self._tasks: list[asyncio.Task[None]] = []

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Calls `listener` for each new step row."""
        self._row_listeners.append(listener)

    def listen_notices(self, listener: Callable[[str], None]) -> None:
        """Calls `listener` with a line for each new kind of failure, and for tasks tried again.

        Also for each sign that the run cannot learn, and once for conversations that split.
        """
        self._notice_listeners.append(listener)

    def listen_servers(self, listener: Callable[[str], None]) -> None:
        """Calls `listener` with a line for each quarantine, once a minute for a server at most."""
        self._server_listeners.append(listener)

    def start(self) -> None:
        self._tasks = [
            endless.keep(self._loop(name, poll), f"poll-{name}", partial(self._ended, name))
            for name, poll in self._polls().items()
        ]

    def _polls(self, max_wait_s: float = 5.0) -> dict[str, Callable[[], Awaitable[None]]]:
        polls: dict[str, Callable[[], Awaitable[None]]] = {}
        if self._buffer is not None:
            polls["buffer"] = partial(self._poll_ledger, self._buffer)
        if self._weights is not None:
            polls["weight-sync"] = partial(self._poll_weights, self._weights)
        if self._trainer is not None:
            polls["trainer"] = partial(self._poll_trainer, self._trainer, max_wait_s)
        return polls

    async def refresh(self, timeout: float = 5.0) -> Snapshot:
        """Asks everything once, now (also without `start`); errors go to `problems`."""
        polls = self._polls(max_wait_s=0.0)
        await asyncio.gather(*(self._once(name, poll, timeout) for name, poll in polls.items()))
        return self.snapshot

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        clients = [self._buffer, self._weights, self._trainer]
        await asyncio.gather(*(c.close() for c in clients if c is not None))

    async def _loop(self, name: str, poll: Callable[[], Awaitable[None]]) -> None:
        while True:
            since = time.monotonic()
            await self._once(name, poll, timeout=30.0)
            # The trainer's long poll waits by itself; an answer at once means "away".
            rest = self._interval_s - (time.monotonic() - since)
            if rest > 0 and (name != "trainer" or name in self.snapshot.problems):
                await asyncio.sleep(rest)

    def _ended(self, name: str, error: BaseException) -> None:
        """A bug in here must not look like figures that do not change."""
        self.snapshot.problems[name] = f"is no longer polled: {type(error).__name__}: {error}"

    async def _once(self, name: str, poll: Callable[[], Awaitable[None]], timeout: float) -> None:
        try:
            async with asyncio.timeout(timeout):
                await poll()
        except ArealError as error:
            self.snapshot.problems[name] = str(error)
        except TimeoutError:
            self.snapshot.problems[name] = f"no answer within {timeout:.0f} s"
        else:
            self.snapshot.problems.pop(name, None)

    async def _poll_ledger(self, buffer: BufferConnection) -> None:
        ledger = await BufferTasks(buffer).get_stats()
        self.snapshot.ledger = ledger
        self._notice()
        now = time.monotonic()
        rates = self._rates
        rates.append((now, ledger.trajectories, ledger.generated_tokens))
        while len(rates) > 2 and now - rates[0][0] > _WINDOW_S:
            rates.popleft()
        elapsed = now - rates[0][0]
        if elapsed > 0:
            self.snapshot.samples_per_s = (ledger.trajectories - rates[0][1]) / elapsed
            self.snapshot.tokens_per_s = (ledger.generated_tokens - rates[0][2]) / elapsed

    def _notice(self) -> None:
        snapshot = self.snapshot
        news = {failure.site: str(failure) for failure in snapshot.failures}
        if snapshot.retried:
            news["retried"] = (
                f"{snapshot.retried} tasks that failed because of the recipe are tried again"
            )
        if snapshot.splits:
            news["splits"] = snapshot.splits
        news |= {finding.rule: str(finding) for finding in snapshot.findings}
        for what, text in news.items():
            if what not in self._noticed:
                self._noticed.add(what)
                for listener in self._notice_listeners:
                    listener(text)

    async def _poll_weights(self, weights: WeightSyncClient) -> None:
        self.snapshot.servers = (await weights.list_servers())[0]
        self._notice_servers(time.monotonic())
        self.snapshot.sync = await weights.status()
        # The ledger learns of tokens only when a group ends. A server that does not answer is left
        # out: weight-sync says what is wrong with it.
        urls = [s.url for s in self.snapshot.servers if s.state is ServerState.SERVING]
        self.snapshot.generating = await ask_speed(urls, self._security.headers())

    def _notice_servers(self, now: float) -> None:
        """Reports a server that is quarantined in one line; one that flaps once a minute."""
        for server in self.snapshot.servers:
            told, not_before = self._quarantined.get(server.server_id, (False, now))
            if server.state is not ServerState.QUARANTINED:
                told = False
            elif not told and now >= not_before:
                told, not_before = True, now + _QUIET_S
                cause = server.cause or "no cause was given"
                for listener in self._server_listeners:
                    listener(f"server {server.server_id} is quarantined: {cause}")
            self._quarantined[server.server_id] = told, not_before

    async def _poll_trainer(self, trainer: TrainerClient, max_wait_s: float) -> None:
        snapshot = self.snapshot
        after = snapshot.rows[-1]["step"] if snapshot.rows else 0
        status = await trainer.get_status(after_step=after, max_wait_s=max_wait_s)
        before = snapshot.trainer
        snapshot.trainer = status
        if before is not None and before.incarnation != status.incarnation:
            # A restarted trainer repeats the steps after its checkpoint.
            snapshot.rows = [r for r in snapshot.rows if r["step"] <= status.step]
            return
        for row in status.rows:
            snapshot.rows.append(row)
            thin(snapshot.rows)
            for listener in self._row_listeners:
                listener(row)
        if status.rows:
            self._notice()

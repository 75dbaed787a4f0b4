"""One server's life, as one task: reach it, bring it to the target, confirm, watch, retry.

    ┌──> step ──> target? ── version behind ──> verify files ─> pause ─> load ─> confirm ─> continue
    │              └ at the target ──> probe
    │    any EngineError ──> QUARANTINED(cause), backoff with jitter
    └─── sleep until: poke (new target, report, register) | probe_interval_s | backoff over

The newest target is read at the start of every step: versions published while one loads are
skipped. Members share nothing but the files' digests and the votes, so a dead or slow server delays
no other. Whatever happens between pause and continue, continue is sent: a server left paused hangs
every request in it. When the weights could not be confirmed its requests are aborted first (their
callers keep the tokens so far and continue elsewhere), so that none continues with unknown weights.

A version that its trainer broadcasts has no files at first: a member with a seat receives it, the
others keep what they have until it is stored.

A version that is an adapter is loaded beside version 0's weights, without a pause (`adapting`).

An engine that stages (areal_inference) reads and compares the weights beforehand and swaps them in
between two decode steps: updated in place, it is never paused.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from areal.chassis.backoff import Backoff
from areal.chassis.logging import get_logger
from areal.errors import InvalidInput
from areal.weights.broadcast import Seat
from areal.weights.manifest import PolicyVersion
from areal.weights.servers import ServerState
from areal_weight_sync.adapting import load_adapter, probe_adapter, unload_others
from areal_weight_sync.confirmation import probe_prompt
from areal_weight_sync.engine.base import Engine, EngineError, Fault, Fingerprint
from areal_weight_sync.engine.draining import empty
from areal_weight_sync.engine.probing import ask_version, inspect
from areal_weight_sync.interfaces import CoordinatorView, NotStoredError
from areal_weight_sync.server_state import (
    DRAINING,
    JOINING,
    QUARANTINED,
    SERVING,
    SYNCING,
    ServerRecord,
)
from areal_weight_sync.turns import ASLEEP, UNLOADED, now

_SLEEPS = "asleep while the trainer computes on its GPU"
_ANEW = "version {} was created again by another trainer"


class Member:
    """Brings one server along; `run` until cancelled, then maybe `drain`."""

    def __init__(self, record: ServerRecord, engine: Engine, coordinator: CoordinatorView) -> None:
        self.record = record
        self._engine = engine
        self._coordinator = coordinator
        self._backoff = Backoff(coordinator.config.backoff_s, coordinator.config.backoff_max_s)
        self._poked = asyncio.Event()
        self._deep = True
        self._served: PolicyVersion | None = None
        self._doubted = False
        self._reported = False
        self._mute = False  # it answered probes and failed to generate
        self._probes = 0
        self.asleep = False
        self._unloaded = False  # its weights are undefined: it must not continue
        self.gone = False  # its process ended, as far as one can tell: it holds no memory
        self._connections = -1  # of the engine, when the boot was last asked
        self._based = ""  # boot that holds version 0's weights, confirmed
        self.loading = ""  # path of the version that the server was last told to read
        self._log = get_logger(__name__).bind(server=record.server_id)

    @property
    def ranks(self) -> int:
        """The number of processes that a broadcast must reach."""
        return self._engine.ranks

    def poke(self, *, deep: bool = False, revive: bool = False) -> None:
        """Wakes the task to take its next step now, because something happened.

        Args:
            deep: Use the full probe.
            revive: Even in quarantine, whose backoff nothing else cuts short.
        """
        self._deep = self._deep or deep
        if revive or self.record.state is not QUARANTINED:
            self._poked.set()

    def suspect(self) -> None:
        """Probes the server now, with less patience, because a client's request failed there."""
        self._reported = self.record.state is SERVING
        self.poke(deep=True)

    def doubt(self) -> None:
        """Has the server load and confirm again, because its checksum was outvoted."""
        self._doubted = True
        self.poke(deep=True)

    def disown(self, version: PolicyVersion) -> None:
        """Checks whether this server holds abandoned weights of a number that was reused."""
        if not self.record.holds_other(version):
            return
        if self.record.state is SERVING:
            self._rejoin(_ANEW.format(version.version))
        self.record.version = -1

    async def run(self) -> None:
        """Runs one step after another until cancelled."""
        while True:
            self._poked.clear()
            pause = await self._step() * random.uniform(0.7, 1.0)  # noqa: S311 - not all at once
            try:
                async with asyncio.timeout(pause):
                    await self._poked.wait()
            except TimeoutError:
                pass

    async def _step(self) -> float:
        """Takes one step; returns how long to sleep unless poked."""
        record, config = self.record, self._coordinator.config
        target = self._coordinator.target
        try:
            serving = record.state is SERVING
            if self._coordinator.turns.trainers(now()):
                await self._rest()
            elif self._doubted:
                doubted, self._doubted, record.version = record.version, False, -1
                raise EngineError(
                    Fault.WRONG_WEIGHTS,
                    f"weights of version {doubted} differ from those of most servers",
                )
            elif target is not None and serving and record.holds(target):
                await self._probe_in_turn(target)
            elif serving and not self._coordinator.slots.take(record.server_id, self.poke):
                await self._probe_in_turn(self._served)  # not its turn yet: it serves on
                return config.probe_interval_s
            else:
                try:
                    await self._bring(target)
                finally:
                    self._coordinator.slots.free(record.server_id)
        except EngineError as error:
            return self._quarantine(error)
        except NotStoredError as error:  # a server that serves, serves on
            self._move(record.state, str(error))
            return 0.0 if target and target.stored else config.probe_interval_s
        except InvalidInput as error:  # the version is bad, not the server
            if self._coordinator.target is not target:  # and it may be gone: a newer one has come
                return 0.0
            self._log.error("version_unusable", error=str(error))
            self._move(record.state, str(error))
            return config.backoff_max_s
        if record.state is SERVING:
            self._backoff.reset()
        newest = self._coordinator.target
        behind = newest is not None and not record.holds(newest) and not self.asleep
        return 0.0 if behind else config.probe_interval_s

    async def _bring(self, target: PolicyVersion | None) -> None:
        """Brings the server from its state to SERVING at the target."""
        record = self.record
        if record.state is not SERVING:
            await self._meet()
            if not self.asleep:
                self._move(JOINING)
            if self._coordinator.config.turns and not await self._awake():
                return
        if target is None:
            return
        if not record.holds(target) or not await self._reconfirm(target):
            await asyncio.to_thread(self._coordinator.digests.verify, target)
            if target.adapter is not None:
                await self._adapt(target)
                return
            await self._update(target)
            self._based = record.boot_id if target.version == 0 else ""
        if record.state is not SERVING and self._mute:
            await self._try_generation(target)
        self._serve(target)

    async def _rest(self) -> None:
        """Puts the server to sleep for the trainer's turn, or looks whether it still sleeps."""
        record = self.record
        if self.asleep:
            if not (await self._version()).startswith(ASLEEP):
                self._rejoin("woken by someone else")
            elif (
                self._engine.connections != self._connections
                and await self._boot() != record.boot_id
            ):
                self._rejoin("restarted")
            return
        if record.state is not SERVING:
            await self._meet()
            self._move(JOINING)
        version = await self._version()
        self._move(SYNCING, _SLEEPS)  # no new traffic: what is aborted continues after the turn
        if not version.startswith(ASLEEP):
            running = await self._engine.running()
            await self._engine.sleep(f"{ASLEEP} after {version}")
            record.aborted_requests += running
            self._coordinator.totals.aborted_requests += running
            self._log.info("asleep", version=version, aborted=running)
        record.version, self._doubted = -1, False  # it loads again when it wakes
        self.asleep = True
        self._coordinator.changed(record)

    async def _awake(self) -> bool:
        """Whether the server has its memory, after it was woken if it may be."""
        version = await self._version()
        self._unloaded = version.startswith((ASLEEP, UNLOADED))
        if self._unloaded:
            self.record.version = -1
        self.asleep = version.startswith(ASLEEP) and not self._coordinator.turns.may_wake(now())
        if self.asleep:
            self._move(SYNCING, _SLEEPS)
        elif version.startswith(ASLEEP):  # from now on it holds memory, whatever comes of the call
            await self._engine.wake(UNLOADED)
        return not self.asleep

    async def _meet(self) -> None:
        """Contacts the server for the first time in this state, and reads which boot it is."""
        boot = await self._boot()
        self.gone = False
        rank = self._coordinator.config.adapter_rank
        if self._engine.lora_rank < rank:
            raise EngineError(
                Fault.UPDATE_REFUSED,
                f"the run publishes adapters of rank {rank} (actor.lora), and the server was "
                f"started for {self._engine.lora_rank or 'none'}: expected --enable-lora "
                f"--max-lora-rank {rank}",
            )
        if boot != self.record.boot_id:
            self.record.boot_id, self.record.version = boot, -1
            self._coordinator.changed(self.record)

    async def _adapt(self, target: PolicyVersion) -> None:
        """Brings version 0's weights, or an adapter beside them, to SERVING with this adapter."""
        record, engine, base = self.record, self._engine, self._coordinator.base
        if base is None:
            raise NotStoredError(f"version {target.version}: there is no version 0 yet")
        before = self._served.adapter_name if self._served and record.state is SERVING else ""
        if self._based != record.boot_id:
            await asyncio.to_thread(self._coordinator.digests.verify, base)
            await self._update(base)
            self._based = record.boot_id
        self.loading = target.path
        await load_adapter(engine, target, timeout=self._coordinator.config.update_timeout_s)
        was_serving = record.state is SERVING
        running = await engine.running() if was_serving else 0
        # What ends here waits for a server that serves, and begins again with the new name. A
        # request that comes late still finds the adapter before.
        self._move(SYNCING)
        start = time.perf_counter()
        await engine.abort_all()
        found = await probe_adapter(engine, target, base)
        self._coordinator.confirmation.compare(target.version, record.server_id, found)
        self._mute = False
        if was_serving:
            self._coordinator.updated(record, time.perf_counter() - start, running)
            record.aborted_requests += running
        self._serve(target)
        await unload_others(engine, {target.adapter_name, before}, record.server_id)

    async def _reconfirm(self, target: PolicyVersion) -> bool:
        """Confirms the same boot by its checksum; returns False if it has to load to be sure."""
        if await self._version() != self._weights_of(target):
            return False
        fingerprint = await self._engine.fingerprint(self._coordinator.config.update_timeout_s)
        if fingerprint is None:
            return False
        base = self._coordinator.base
        if target.adapter is None or base is None:
            self._vote(target, fingerprint)
        else:
            if target.adapter_name not in await self._engine.adapters():
                return False
            self._vote(base, fingerprint)
            self._based = self.record.boot_id
        # A coordinator that died in an update may have left it paused.
        await self._engine.resume()
        return True

    async def _update(self, target: PolicyVersion) -> None:
        record, engine, config = self.record, self._engine, self._coordinator.config
        self.loading = target.path
        was_serving, grace = record.state is SERVING, None
        staged = await self._ahead(target)
        mode = await self._mode(target)
        pausing = not (staged and mode == "in_place")
        end_turn = await self._coordinator.pauses.turn() if pausing else None
        if was_serving:
            loop = asyncio.get_running_loop()
            grace = loop.call_later(config.serving_grace_s, self._leave_traffic)
        else:
            self._move(SYNCING)
        aborted = await engine.running() if mode == "abort" else 0
        start, deadline = time.perf_counter(), time.monotonic() + config.update_timeout_s
        confirmed, by_checksum = False, False
        try:
            if end_turn is not None:
                await engine.pause(mode)
                end_turn()
            await engine.load(
                target,
                flush_cache=mode != "in_place",
                timeout=max(0.1, deadline - time.monotonic()),
            )
            fingerprint = await inspect(
                engine, target.name, self._version(), max(0.1, deadline - time.monotonic())
            )
            by_checksum = fingerprint is not None
            if fingerprint is not None:
                self._vote(target, fingerprint)
            else:  # the probe needs generation to continue: no new traffic until it has answered
                self._leave_traffic()
            confirmed, self._unloaded = True, False
        except EngineError as error:
            # First of all: its running requests go elsewhere, whether or not it still listens.
            record.version = -1
            self._move(QUARANTINED, str(error))
            raise
        finally:
            if grace is not None:
                grace.cancel()
            if not confirmed:
                record.version = -1
                self._leave_traffic()
            if pausing or not confirmed:
                await self._release(confirmed)
        seconds = time.perf_counter() - start
        if not by_checksum:
            prompt = probe_prompt(target)
            self._coordinator.confirmation.compare(
                target.version, record.server_id, await engine.logprobs(prompt, target.name)
            )
        if was_serving:
            record.aborted_requests += aborted
            self._coordinator.updated(record, seconds if pausing else 0.0, aborted)
        record.hold(target)
        self._coordinator.routine.info(
            "updated",
            server=record.server_id,
            version=target.version,
            seconds=round(seconds, 4),
        )

    async def _mode(self, target: PolicyVersion) -> str:
        interrupt = self._coordinator.config.interrupt
        if self.record.state is SERVING or self.record.holds(target):
            return interrupt
        # Other weights by this number: nothing of theirs may continue, or stay in the cache.
        return (
            "abort" if await self._version() == target.name else self._coordinator.config.interrupt
        )

    async def _ahead(self, target: PolicyVersion) -> bool:
        """Does what can be done before the pause; returns True if only the swap is left."""
        serving = self.record.state is SERVING
        seat = self._coordinator.broadcasts.take(self.record.server_id, target) if serving else None
        if seat is None and not target.stored:
            if serving:
                await self._version()
            raise NotStoredError(f"version {target.version} is not stored yet")
        return serving and await self._stage(target, seat)

    async def _stage(self, target: PolicyVersion, seat: Seat | None) -> bool:
        """Whether the version was read, or received, and compared ahead, while requests continue.

        The server is watched as closely as between updates: it still takes traffic.
        """
        config, engine, timeout = (
            self._coordinator.config,
            self._engine,
            self._coordinator.config.update_timeout_s,
        )
        work = engine.receive(target, seat, timeout=timeout) if seat else None
        staging = asyncio.create_task(work or engine.stage(target, timeout=timeout), name="stage")
        try:
            while not (await asyncio.wait({staging}, timeout=config.probe_interval_s))[0]:
                await self._version()
            fingerprint = await staging
        except EngineError as error:
            if seat is None or error.fault is not Fault.UPDATE_REFUSED:
                raise
            self._coordinator.broadcasts.end(self.record.server_id)
            self._log.warning("broadcast_missed", version=target.version, cause=str(error))
            raise NotStoredError(f"version {target.version} missed: {error}") from None
        finally:
            staging.cancel()
        if fingerprint is not None:
            self._vote(target, fingerprint)
        return fingerprint is not None

    async def _release(self, confirmed: bool) -> None:
        """Lets a paused server continue, whatever happened before, unless it holds no weights."""
        steps: list[Callable[[], Awaitable[None]]] = [self._engine.resume]
        if not confirmed:
            steps = [self._engine.abort_all, *(() if self._unloaded else steps)]
        for number, step in enumerate(steps):
            try:
                await step()
            except EngineError as error:
                if confirmed and number == len(steps) - 1:
                    raise
                self._log.warning("release_failed", step=step.__name__, error=str(error))

    async def _probe_in_turn(self, target: PolicyVersion | None) -> None:
        end_turn = await self._coordinator.probes.turn()  # it ends by itself when this fails
        await self._probe(target)
        end_turn()

    async def _probe(self, target: PolicyVersion | None) -> None:
        """Checks that the server is alive, the same process, and at its confirmed version.

        A server that is started again closes its connections. So on one that stayed open the
        process is the same, and only after a new one it is asked which boot it is.
        """
        assert target is not None, "it serves"
        self._probes += 1
        deep = self._deep or self._probes % self._coordinator.config.deep_probe_every == 0
        self._deep, reported = False, self._reported
        version = await self._version()
        if version != self._weights_of(target):
            self._rejoin(f"its weight_version became {version!r:.100}")
        elif deep or self._engine.connections != self._connections:
            if deep:
                await self._engine.running()
            if await self._boot() != self.record.boot_id:
                self._rejoin("restarted")
            elif reported:
                await self._try_generation(target)

    def _weights_of(self, target: PolicyVersion) -> str:
        """Returns what the server reports for this version: with adapters, version 0's."""
        base = self._coordinator.base
        return base.name if target.adapter is not None and base is not None else target.name

    async def _boot(self) -> str:
        # Before: a connection made meanwhile may be to another process.
        self._connections = self._engine.connections
        return await self._engine.boot_id()

    async def _version(self) -> str:
        """Reads the server's version; has less patience after a client's failed request."""
        reported, self._reported = self._reported, False
        return await ask_version(
            self._engine,
            self._coordinator.config.probe_timeout_s,
            lambda: reported or self._reported,
            self.record.server_id,
        )

    async def _try_generation(self, target: PolicyVersion) -> None:
        """Tries one generation, because a client said that it fails while probes succeed."""
        try:
            asked = self._coordinator.base or target
            await self._engine.logprobs(probe_prompt(asked), target.name, target.adapter_name)
        except EngineError as error:
            # Late the first time: maybe behind the requests it has.
            if error.fault is not Fault.TIMEOUT or self._mute:
                self._mute = True
                raise
            self._log.info("generation_probe_late", cause=str(error))
        self._mute = False

    def _rejoin(self, cause: str) -> None:
        """Starts over with a server that no longer is what was confirmed."""
        self._log.warning("server_changed", cause=cause)
        self._coordinator.confirmation.forget(self.record.server_id)
        self.asleep = False
        self.record.version = -1
        self._move(JOINING, cause)
        self._poked.set()

    def _vote(self, target: PolicyVersion, fingerprint: Fingerprint) -> None:
        outvoted = self._coordinator.confirmation.vote(
            target.version, self.record.server_id, fingerprint
        )
        if outvoted:
            self._coordinator.recheck(outvoted)

    def _serve(self, target: PolicyVersion) -> None:
        self._served, newest = target, self._coordinator.target
        self.record.hold(target)
        if newest is not None and self.record.holds_other(newest):
            return self._rejoin(_ANEW.format(target.version))
        self._backoff.reset()
        self._move(SERVING)
        return self._coordinator.changed(self.record)

    def _leave_traffic(self) -> None:
        """The update takes long, or cannot be confirmed in the pause: requests go elsewhere."""
        if self.record.state is SERVING:
            self._move(SYNCING)

    def _quarantine(self, error: EngineError) -> float:
        """Takes the server out of traffic; returns the time to the next try."""
        record, config = self.record, self._coordinator.config
        self.asleep, self.gone = False, error.fault is Fault.UNREACHABLE
        self._coordinator.broadcasts.end(record.server_id)
        self._reported = False
        never_reached = record.state is JOINING and not record.boot_id
        if never_reached and error.fault is Fault.UNREACHABLE:
            self._move(JOINING, f"not up yet: {error}")
            return config.probe_interval_s
        if record.state is SERVING or self._backoff.fresh:
            self._log.warning("server_quarantined", cause=str(error), fault=error.fault.value)
        self._coordinator.failed(error.fault)
        if error.fault in (Fault.WRONG_VERSION, Fault.WRONG_WEIGHTS):
            record.version = -1
        self._move(QUARANTINED, str(error))
        pause = self._backoff.next()
        # One that cannot be reached is being restarted, most likely; asking costs nothing.
        return config.probe_interval_s if error.fault is Fault.UNREACHABLE else pause

    def _move(self, state: ServerState, cause: str = "") -> None:
        if self.record.move(state, cause):
            self._coordinator.changed(self.record)

    async def drain(self, deadline_s: float) -> None:
        """Waits until the server is empty; past the deadline its requests are aborted."""
        self._move(DRAINING)
        self._coordinator.slots.free(self.record.server_id)
        interval_s = self._coordinator.config.probe_interval_s
        await empty(self._engine, deadline_s, interval_s, self.record.server_id)

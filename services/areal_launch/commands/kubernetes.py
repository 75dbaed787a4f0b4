"""`areal run --on kubernetes`: install or upgrade, follow, leave or remove.

    context shown ──> helm upgrade --install ──> starting ──> ready ──> trainer's job ends ──>
    summary ──> uninstall (unless --keep, or it failed)
    Ctrl-C: the release runs on, and how to follow it again or remove it is said

| state    | consumes       | waits for                       | unblocked by                     |
|----------|----------------|---------------------------------|----------------------------------|
| starting | kubectl        | the model; then pods of buffer  | ready; the end of prepare's Job; |
|          |                | and weight-sync                 | stack.kubernetes.timeout_s       |
| ready    | port-forwards  | the trainer's job, or a signal  | its condition, a signal          |
| both     |                | a component that cannot start   | `STUCK_S` of pods.py             |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
import uuid
from typing import Any

from areal.config.experiment import BaseExperimentConfig
from areal.errors import ArealError, WaitTimeout
from areal_launch.clusters.kubernetes import Outcome, Release
from areal_launch.clusters.pods import StuckWatch, component_of, problems_of, processes_of
from areal_launch.commands.remote import Follower
from areal_launch.commands.stack import draw_plot
from areal_launch.processes.free_ports import PortPicker
from areal_launch.processes.orphan_guard import Guard
from areal_launch.processes.process import ProcessSpec
from areal_launch.processes.supervisor import RestartPolicy, Supervisor
from areal_launch.run_folder import RunFolder, write_json
from areal_launch.stack.remote import RemoteStack
from areal_launch.view.display import choose_display
from areal_launch.view.poller import Snapshot
from areal_launch.view.summary import build_summary

LOOK_INTERVAL_S = 3.0
# The cluster's API may be away for so long before following is given up.
SILENCE_S = 120.0
NEEDED = ("buffer", "weight-sync")


class Stuck(WaitTimeout):
    """A component cannot start, and waiting does not help."""


def run_on_kubernetes(config: BaseExperimentConfig, *, as_json: bool, keep: bool) -> int:
    """Drives one release; returns the exit code."""
    folder = RunFolder(config.run_dir)
    release = Release(config, folder.path / "kubernetes")
    print(f"areal: release {release.name}: {release.pin_context()}", file=sys.stderr, flush=True)  # noqa: T201
    release.install()
    stack = RemoteStack(config, folder, "Ctrl-C leaves it running")
    display = choose_display(as_json=as_json, quiet=False)
    follower = ReleaseFollower(release, Follower("kubernetes", stack, display), keep=keep)
    return asyncio.run(follower.run())


class ReleaseFollower:
    """Shows one release until its trainer has ended."""

    def __init__(self, release: Release, follower: Follower, *, keep: bool) -> None:
        self._release = release
        self._follower = follower
        self._keep = keep
        self._began = self._began_to_wait = time.monotonic()
        self._told: dict[tuple[str, ...], str] = {}
        self._stuck = StuckWatch()
        self._prepared = False
        self._prepare_said = ""
        self._stack_id = f"forward:{uuid.uuid4().hex}"
        # The guard ends the port-forwards of a follower that was killed with -9; it reads the note.
        self._note = follower.stack.folder.path / "kubernetes" / f"follower-{os.getpid()}.json"
        self._guard = Guard(self._note, None, self._on_forward)
        # A pod that is replaced ends its port-forward, any number of times in a long run.
        self._forwards = Supervisor(
            self._stack_id,
            RestartPolicy(max_restarts=1_000_000, ready_timeout_s=60.0),
            self._on_forward,
        )

    async def run(self) -> int:
        """Until the end; the exit code."""
        follower = self._follower
        follower.handle_signals()
        end = "stays" if self._keep else "is removed, but for its volumes (--keep: stays)"
        follower.say(f"release {self._release.name} is installed; after the training it {end}")
        outcome, snapshot = Outcome(), Snapshot()
        try:
            outcome = await self._follow()
        finally:
            try:
                if follower.poller is not None:
                    snapshot = await follower.poller.refresh(timeout=3.0)
                await follower.stop_showing("no longer following")
            finally:
                await self._forwards.stop([list(self._forwards.processes)], grace_s=3.0)
                await self._guard.stop()
                self._note.unlink(missing_ok=True)
        if not outcome.word:
            self._say_how_to_go_on()
            return 130
        return await self._conclude(outcome, snapshot)

    async def _follow(self) -> Outcome:
        stack, silent_since = self._follower.stack, 0.0
        while not self._follower.signals:
            try:
                outcome = await asyncio.to_thread(self._look)
                silent_since = 0.0
            except Stuck:
                self._say_how_to_go_on()
                raise
            except ArealError as error:
                silent_since = silent_since or time.monotonic()
                if time.monotonic() - silent_since > SILENCE_S:
                    raise WaitTimeout(
                        "an answer", on="the cluster", since=silent_since, hint=str(error)
                    ) from None
                outcome = Outcome()
            if outcome.word:
                stack.state = outcome.word
                return outcome
            if self._follower.poller is None and stack.state == "ready":
                await self._show()
            self._check_deadline()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._follower.signalled.wait(), LOOK_INTERVAL_S)
        return Outcome()

    def _look(self) -> Outcome:
        stack, pods = self._follower.stack, self._release.pods()
        stack.processes = processes_of(pods, self._release.name)
        for problem in problems_of(pods):
            if problem.key not in self._told:
                self._told[problem.key] = str(problem)
                self._follower.say(str(problem))
        lasting = self._stuck.look(pods, time.monotonic())
        if lasting is not None:
            problem, since = lasting
            raise Stuck(
                f"a pod of {problem.component} that can start",
                on=f"release {self._release.name}, which stays",
                since=since,
                hint=str(problem),
            )
        failed = self._look_at_model(pods)
        if failed.word:
            return failed
        up = {
            component_of(pod)
            for pod in pods
            if (pod.get("status") or {}).get("phase") == "Running"
            and all(s.get("ready") for s in pod["status"].get("containerStatuses") or [{}])
        }
        if stack.state == "starting" and up.issuperset(NEEDED):
            stack.state = "ready"
        return self._release.outcome()

    def _look_at_model(self, pods: list[dict[str, Any]]) -> Outcome:
        """Says how far the Job is that makes or brings the model; its failure is the run's."""
        if self._prepared:
            return Outcome()
        outcome = self._release.preparation()
        self._prepared = outcome.word == "finished"
        running = any(
            component_of(pod) == "prepare" and (pod.get("status") or {}).get("phase") == "Running"
            for pod in pods
        )
        if running:
            self._began_to_wait = time.monotonic()
        if running or outcome.word == "failed":
            said = self._release.last_words("prepare", lines=1).rpartition("\n")[2]
            if said and said != self._prepare_said:
                self._prepare_said = said
                self._follower.say(f"prepare: {said}")
        if outcome.word == "failed":
            return Outcome("failed", f"{outcome.cause} | {self._prepare_said}".rstrip("| "))
        return Outcome()

    async def _show(self) -> None:
        """Forwards ports and begins to draw."""
        release, picker = self._release, PortPicker()
        services = await asyncio.to_thread(release.services)
        ports = {component: picker.pick(component) for component in services}
        logs = self._follower.stack.folder
        write_json(self._note, {"stack_id": self._stack_id})
        await self._guard.start()
        self._forwards.start(
            *(
                ProcessSpec(
                    f"forward-{component}",
                    release.forward(component, port),
                    logs.log_of(f"forward-{component}"),
                )
                for component, port in ports.items()
            )
        )
        endpoints = release.endpoints(ports)
        self._follower.stack.config.endpoints = endpoints
        self._follower.show(endpoints, await asyncio.to_thread(release.security))

    def _check_deadline(self) -> None:
        limit = self._release.config.stack.kubernetes.timeout_s
        since = self._began_to_wait
        if self._follower.stack.state != "starting" or time.monotonic() - since < limit:
            return
        waiting = [n for n, p in self._follower.stack.processes.items() if p.state != "up"]
        said = "; ".join(self._told.values())
        raise WaitTimeout(
            f"pods of {' and '.join(NEEDED)}",
            on=f"release {self._release.name}, which stays",
            since=since,
            hint=said or f"not ready: {', '.join(waiting) or 'no pods yet'}",
        )

    def _on_forward(self, level: str, process: str, text: str) -> None:
        """Port-forwards end with their pods: worth a line in the log only."""
        if level == "error":
            self._follower.stack.events.report("warning", process, text)

    async def _conclude(self, outcome: Outcome, snapshot: Snapshot) -> int:
        stack, folder = self._follower.stack, self._follower.stack.folder
        error: ArealError | None = None
        if outcome.word == "failed":
            words = await asyncio.to_thread(self._release.last_words)
            error = ArealError(f"{outcome.cause}{f' | {words}' if words else ''}")
        summary = self._sum_up(outcome, snapshot, str(error or ""))
        await asyncio.to_thread(draw_plot, folder)
        self._follower.display.summary(stack, summary, error)
        if error is not None or self._keep:
            self._say_how_to_go_on()
        else:
            await asyncio.to_thread(self._release.uninstall)
            self._follower.say(
                f"release {self._release.name} removed; checkpoints and the ledger are on its "
                f"volumes, the summary in {folder.path}"
            )
        return 0 if error is None else 1

    def _sum_up(self, outcome: Outcome, snapshot: Snapshot, cause: str) -> dict[str, Any]:
        stack, folder = self._follower.stack, self._follower.stack.folder
        summary = build_summary(
            status=outcome.word,
            rows=snapshot.rows,
            results={},
            snapshot=snapshot,
            wall_s=time.monotonic() - self._began,
            cpu_s=0.0,
            memory_mb={},
            restarts={n: p.restarts for n, p in stack.processes.items()},
            cause=cause,
        )
        write_json(folder.summary_file, summary)
        rows = "".join(json.dumps(row) + "\n" for row in snapshot.rows)
        folder.metrics_file.write_text(rows)
        return summary

    def _say_how_to_go_on(self) -> None:
        release = self._release
        helm, kubectl = " ".join(release.helm_command), " ".join(release.kubectl_command)
        selector = f"app.kubernetes.io/instance={release.name},app.kubernetes.io/component=trainer"
        self._follower.say(f"release {release.name} stays. Follow it: the same command again, or")
        self._follower.say(f"  {kubectl} logs -f -l {selector}")
        self._follower.say(f"Remove it: {helm} uninstall {release.name}")

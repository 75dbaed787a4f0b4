"""`areal run --on kubernetes`: install or upgrade, follow, then keep or remove the release.

    context shown ──> helm upgrade --install ──> starting ──> ready ──> trainer's job ends ──>
    summary ──> uninstall (unless --keep, or it failed)
    Ctrl-C: the release continues; how to follow it again or remove it is printed

| state    | consumes       | waits for                       | unblocked by                     |
|----------|----------------|---------------------------------|----------------------------------|
| starting | the API        | the model; then pods of buffer  | ready; the end of prepare's Job; |
|          |                | and weight-sync                 | PULL_S, rollout.setup_timeout_s  |
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

from areal.config.experiment import BaseExperimentConfig, GRPOConfig
from areal.config.learning_rules import of_config
from areal.errors import ArealError, WaitTimeout
from areal_launch.clusters.kubernetes import Outcome, Release
from areal_launch.clusters.pods import StuckWatch, component_of, is_ready, problems_of, processes_of
from areal_launch.commands.remote import Follower
from areal_launch.commands.stack import draw_plot
from areal_launch.processes.free_ports import PortPicker
from areal_launch.processes.orphan_guard import Guard
from areal_launch.processes.process import ProcessSpec
from areal_launch.processes.supervisor import RestartPolicy, Supervisor
from areal_launch.run_folder import RunFolder, write_json
from areal_launch.stack.remote import RemoteStack
from areal_launch.view.display import Display, choose_display
from areal_launch.view.poller import LAST_LOOK_S, Snapshot
from areal_launch.view.rows import read_rows
from areal_launch.view.summary import build_summary

LOOK_INTERVAL_S = 3.0
PULL_S = 600.0  # time for images of several GiB to be pulled
SILENCE_S = 120.0  # stop following if the cluster's API does not answer for this long
NEEDED = ("buffer", "weight-sync")


class Stuck(WaitTimeout):
    """A component cannot start, and waiting does not help."""


def run_on_kubernetes(config: BaseExperimentConfig, *, as_json: bool, keep: bool) -> int:
    """Drives one release; returns the exit code."""
    folder = RunFolder(config.run_dir)
    release = Release(config, folder.path / "kubernetes")
    print(f"areal: release {release.name}: {release.api}", file=sys.stderr, flush=True)  # noqa: T201
    release.install()
    stack = RemoteStack(config, folder, "Ctrl-C leaves it running")
    display = choose_display(as_json=as_json, quiet=False)
    return asyncio.run(ReleaseFollower(release, stack, display, keep=keep).run())


class ReleaseFollower(Follower):
    """Shows one release until its trainer has ended."""

    def __init__(
        self, release: Release, stack: RemoteStack, display: Display, *, keep: bool
    ) -> None:
        super().__init__("kubernetes", stack, display, silence_s=SILENCE_S)
        self._release = release
        self._keep = keep
        self._began = self._began_to_wait = time.monotonic()
        self._told: dict[tuple[str, ...], str] = {}
        self._stuck = StuckWatch()
        self._prepared = False
        self._prepare_said = ""
        self._stack_id = f"forward:{uuid.uuid4().hex}"
        # The guard ends the port-forwards of a follower that was killed with -9; it reads the note.
        self._note = stack.folder.path / "kubernetes" / f"follower-{os.getpid()}.json"
        self._guard = Guard(self._note, None, self._on_forward)
        # A pod that is replaced ends its port-forward, any number of times in a long run.
        self._forwards = Supervisor(
            self._stack_id,
            RestartPolicy(max_restarts=1_000_000, ready_timeout_s=60.0),
            self._on_forward,
        )

    async def run(self) -> int:
        self.handle_signals()
        end = "it is kept" if self._keep else "it is removed, except its volumes (unless --keep)"
        self.say(f"release {self._release.name} is installed; after training, {end}")
        outcome, snapshot = Outcome(), Snapshot()
        try:
            outcome = await self._follow()
        except Stuck:
            self._say_how_to_continue()
            raise
        finally:
            try:
                if self.poller is not None:
                    snapshot = await self.poller.refresh(timeout=LAST_LOOK_S)
                await self.stop_showing("no longer following the release")
            finally:
                await self._forwards.stop([list(self._forwards.processes)], grace_s=3.0)
                await self._guard.stop()
                self._note.unlink(missing_ok=True)
        if not outcome.word:
            self._say_how_to_continue()
            return 130
        return await self._conclude(outcome, snapshot)

    async def _follow(self) -> Outcome:
        while not self.signals:
            outcome = await self.ask(self._look, Outcome())
            if outcome.word:
                self.stack.state = outcome.word
                return outcome
            if self.poller is None and self.stack.state == "ready":
                await self._show()
            self._check_deadline()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.signalled.wait(), LOOK_INTERVAL_S)
        return Outcome()

    def _look(self) -> Outcome:
        stack, pods = self.stack, self._release.pods()
        stack.processes = processes_of(pods, self._release.name)
        for problem in problems_of(pods):
            if problem.topic not in self._told:
                self._told[problem.topic] = str(problem)
                self.say(str(problem))
        lasting = self._stuck.look(pods, time.monotonic())
        if lasting is not None:
            problem, since = lasting
            raise Stuck(
                f"a pod of {problem.component} that can start",
                on=f"release {self._release.name}, which is kept",
                since=since,
                hint=str(problem),
            )
        failed = self._look_at_model(pods)
        if failed.word:
            return failed
        ready = {component_of(pod) for pod in pods if is_ready(pod)}
        if stack.state == "starting" and ready.issuperset(NEEDED):
            stack.state = "ready"
        return self._release.outcome()

    def _look_at_model(self, pods: list[dict[str, Any]]) -> Outcome:
        """Reports the progress of the Job that prepares the model; fails when the Job fails."""
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
            said = [line.partition("] ")[2] for line in self._release.last_lines("prepare", 1)]
            if said and said[-1] and said[-1] != self._prepare_said:
                self._prepare_said = said[-1]
                self.say(f"prepare: {said[-1]}")
        if outcome.word == "failed":
            return Outcome("failed", f"{outcome.cause} | {self._prepare_said}".rstrip("| "))
        return Outcome()

    async def _show(self) -> None:
        release, picker = self._release, PortPicker()
        services = await asyncio.to_thread(release.services)
        ports = {component: picker.pick(component) for component in services}
        write_json(self._note, {"stack_id": self._stack_id})
        await self._guard.start()
        for component, port in ports.items():
            name = f"forward-{component}"
            log = self.stack.folder.log_of(name)
            self._forwards.start(ProcessSpec(name, release.forward(component, port), log))
        self.stack.config.endpoints = release.endpoints(ports)
        security = await asyncio.to_thread(release.security)
        self.show(self.stack.config.endpoints, security)
        assert self.poller is not None
        self.poller.listen(self._keep_row)

    def _keep_row(self, row: dict[str, Any]) -> None:
        """The poller forgets some of a long run; of a repeated step, the last row counts."""
        file = self.stack.folder.metrics_file
        try:
            with file.open("a", encoding="utf-8") as rows:
                rows.write(json.dumps(row) + "\n")
        except OSError as error:
            self.say(f"{file}: step {row['step']} was not written: {error.strerror}")

    def _check_deadline(self) -> None:
        limit = max(PULL_S, self._release.config.setup_timeout_s)
        since = self._began_to_wait
        if self.stack.state != "starting" or time.monotonic() - since < limit:
            return
        waiting = [n for n, p in self.stack.processes.items() if p.state != "up"]
        said = "; ".join(self._told.values())
        raise WaitTimeout(
            f"pods of {' and '.join(NEEDED)}",
            on=f"release {self._release.name}, which is kept",
            since=since,
            hint=said or f"not ready: {', '.join(waiting) or 'no pods yet'}",
        )

    def _on_forward(self, level: str, process: str, text: str) -> None:
        """Reports a port-forward that ended with its pod as a warning, not as an error."""
        if level == "error":
            self.stack.events.report("warning", process, text)

    async def _conclude(self, outcome: Outcome, snapshot: Snapshot) -> int:
        stack, folder = self.stack, self.stack.folder
        error: ArealError | None = None
        if outcome.word == "failed":
            words = await asyncio.to_thread(self._release.last_lines, "trainer", 2)
            error = ArealError(" | ".join([outcome.cause, *words]))
        last = snapshot.rows[-1]["step"] if snapshot.rows else 0
        rows = [row for row in read_rows(folder.metrics_file) if row["step"] <= last]
        summary = build_summary(
            status=outcome.word,
            rows=rows or snapshot.rows,
            results={},
            snapshot=snapshot,
            wall_s=time.monotonic() - self._began,
            cpu_s=0.0,
            memory_mb={},
            restarts={n: p.restarts for n, p in stack.processes.items()},
            cause=str(error or ""),
            findings=of_config(stack.config) if isinstance(stack.config, GRPOConfig) else (),
        )
        write_json(folder.summary_file, summary)
        text = "".join(json.dumps(row) + "\n" for row in rows or snapshot.rows)
        folder.metrics_file.write_text(text, "utf-8")
        await asyncio.to_thread(draw_plot, folder)
        self.display.summary(stack, summary, error)
        if error is not None or self._keep:
            self._say_how_to_continue()
        else:
            await asyncio.to_thread(self._release.uninstall)
            self.say(
                f"release {self._release.name} removed; checkpoints and the ledger are on its "
                f"volumes, and the summary is in {folder.path}"
            )
        return 0 if error is None else 1

    def _say_how_to_continue(self) -> None:
        release = self._release
        helm, kubectl = " ".join(release.helm_command), " ".join(release.kubectl_command)
        selector = f"app.kubernetes.io/instance={release.name},app.kubernetes.io/component=trainer"
        self.say(f"release {release.name} is kept. To follow it, run the same command again, or:")
        self.say(f"  {kubectl} logs -f -l {selector}")
        self.say(f"To remove it: {helm} uninstall {release.name}")

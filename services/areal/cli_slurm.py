"""`areal run --on slurm` on a login node: submit, follow, end.

    submit ──> queued ──> running ──> ended ──> summary
                  │ Ctrl-C   │ Ctrl-C: the job's script ends everything, with a checkpoint
                  └──────────┴─ again: Slurm ends it at once

| state   | consumes     | waits for              | unblocked by                          |
|---------|--------------|------------------------|---------------------------------------|
| queued  | the terminal | Slurm                  | the job starts, a signal              |
| running | the terminal | the job, or a signal   | its end, its time limit, a signal     |
| ending  | grace time   | the job's end          | it ends; `END_TIMEOUT_S`, then by force |
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from areal.config import BaseExperimentConfig, load_service_config, save_config
from areal.errors import ArealError, WaitTimeout
from areal.launchers.followed import FollowedStack
from areal.launchers.processes import last_lines
from areal.launchers.run_folder import RunFolder
from areal.launchers.secret_files import place_secrets
from areal.launchers.slurm import JobState, end_job, job_state, render_script, submit
from areal.observability.display import Display, choose_display
from areal.observability.logging import configure_logging
from areal.observability.poller import StackPoller
from areal.observability.shown import NoUsage
from areal.observability.summary import read_results
from areal.security import Security

LOOK_INTERVAL_S = 1.0
# Slurm's controller serves everybody: it is asked less often than our own files.
ASK_INTERVAL_S = 5.0
END_TIMEOUT_S = 120.0


def submit_and_follow(config: BaseExperimentConfig, *, as_json: bool) -> int:
    """Submits the job and shows it until it ends; returns the exit code."""
    folder = RunFolder(config.run_dir.resolve())
    os.close(folder.lock(wait_s=0.0))  # refuses what the job would refuse
    log = folder.log_of("follower").open("a", buffering=1)  # libraries may log to the very last
    configure_logging("follower", config.namespace, stream=log)
    config.run_root = str(Path(config.run_root).resolve())
    place_secrets(config, folder)
    experiment = folder.path / "job.yaml"
    experiment.touch(mode=0o600)
    save_config(config, experiment)
    script = folder.path / "job.sh"
    script.write_text(render_script(config, folder.logs, experiment))
    job = submit(script)
    stack = FollowedStack(config, folder, "Ctrl-C ends the job")
    return asyncio.run(JobFollower(job, stack, choose_display(as_json=as_json, quiet=False)).run())


class JobFollower:
    """Shows one job until it has ended."""

    def __init__(self, job: str, stack: FollowedStack, display: Display) -> None:
        """`job`: submitted."""
        self._job = job
        self._stack = stack
        self._display = display
        self._signals = 0
        self._signalled = asyncio.Event()
        self._poller: StackPoller | None = None
        self._drawing: asyncio.Task[None] | None = None
        self._said = ""

    async def run(self) -> int:
        """Until the end; the exit code."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(signum, self._on_signal)
        self._say(f"job {self._job} submitted; script {self._stack.folder.path / 'job.sh'}")
        try:
            state = await self._follow()
        finally:
            await self._stop_showing()
        return self._conclude(state)

    def _on_signal(self) -> None:
        self._signals += 1
        self._signalled.set()

    async def _follow(self) -> JobState:
        state, asked, ending, handled = JobState("PENDING"), -ASK_INTERVAL_S, 0.0, 0
        while True:
            now = time.monotonic()
            if now - asked >= ASK_INTERVAL_S or self._signalled.is_set():
                state, asked = await asyncio.to_thread(job_state, self._job), now
                self._say_state(state)
                if not state.active:
                    return state
            self._signalled.clear()
            if self._signals > handled:
                handled, ending = self._signals, ending or now
                await asyncio.to_thread(self._end, state, gently=handled == 1)
            if ending and now - ending > END_TIMEOUT_S:
                if now - ending > 2 * END_TIMEOUT_S:
                    raise WaitTimeout(
                        "the end of the job", on=f"Slurm job {self._job}", since=ending
                    )
                await asyncio.to_thread(end_job, self._job, gently=False)
            self._look()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._signalled.wait(), LOOK_INTERVAL_S)

    def _end(self, state: JobState, *, gently: bool) -> None:
        self._say("ending the job; once more: at once" if gently else "ending the job at once")
        end_job(self._job, gently=gently and state.state == "RUNNING")

    def _look(self) -> None:
        """Reads what the launcher in the job writes; shows it once its endpoints are known."""
        if not self._stack.refresh({"slurm_job": self._job}) or self._poller is not None:
            return
        self._stack.config = load_service_config(self._stack.folder.config_file)
        security = Security.load(self._stack.config.security)
        self._poller = StackPoller(self._stack.config.endpoints, security)
        self._poller.start()
        self._display.begin(self._stack, self._poller, NoUsage())
        self._drawing = asyncio.create_task(self._display.run(), name="display")

    async def _stop_showing(self) -> None:
        if self._drawing is not None:
            self._drawing.cancel()
            await asyncio.gather(self._drawing, return_exceptions=True)
            self._drawing = None
            self._display.end("the job has ended")
        if self._poller is not None:
            await self._poller.close()

    def _conclude(self, state: JobState) -> int:
        folder, stack = self._stack.folder, self._stack
        ours = stack.refresh({"slurm_job": self._job})
        summary = read_results(folder.summary_file) if ours else {}
        if ours and stack.state in ("stopped", "failed") and summary:
            error = ArealError(stack.cause) if stack.cause else None
            self._display.summary(stack, summary, error)
            return {"finished": 0, "interrupted": 130}.get(str(summary.get("status")), 1)
        if self._signals:
            return 130
        output = folder.logs / f"slurm-{self._job}.out"
        said = " | ".join(last_lines(output)) or "(empty)"
        raise ArealError(f"job {self._job} ended {state.state}: {output}: {said}")

    def _say_state(self, state: JobState) -> None:
        text = f"job {self._job} {state.state}{f' ({state.reason})' if state.reason else ''}"
        if text != self._said:
            self._said = text
            self._say(text)

    def _say(self, text: str) -> None:
        """A line while nothing else is on the screen."""
        if self._drawing is None:
            print(f"areal: {text}", file=sys.stderr, flush=True)  # noqa: T201
        else:
            self._stack.events.report("info", "slurm", text)

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
import time
from pathlib import Path

from areal.config.experiment import BaseExperimentConfig, load_service_config, save_config
from areal.errors import ArealError, WaitTimeout
from areal.security import Security
from areal_launch.clusters.slurm import JobState, end_job, job_state, render_script, submit
from areal_launch.commands.remote import Follower
from areal_launch.processes.process import last_lines
from areal_launch.run_folder import RunFolder
from areal_launch.stack.remote import RemoteStack
from areal_launch.stack.secret_files import place_secrets
from areal_launch.view.display import Display, choose_display
from areal_launch.view.summary import read_results

LOOK_INTERVAL_S = 1.0
# All users share Slurm's controller, so it is asked less often than our own files are read.
ASK_INTERVAL_S = 5.0
END_TIMEOUT_S = 120.0
# Seconds without an answer from Slurm until we stop following the job, which continues.
SILENCE_S = 600.0


def submit_and_follow(config: BaseExperimentConfig, *, as_json: bool) -> int:
    """Submits the job and shows it until it ends; returns the exit code."""
    folder = RunFolder(config.run_dir.resolve())
    os.close(folder.lock(wait_s=0.0))  # refuses what the job would refuse
    config.run_root = str(Path(config.run_root).resolve())
    place_secrets(config, folder, make_token=False)  # the job makes one, and removes it at its end
    experiment = folder.path / "job.yaml"
    experiment.touch(mode=0o600)
    save_config(config, experiment)
    script = folder.path / "job.sh"
    script.write_text(render_script(config, folder.logs, experiment), "utf-8")
    job = submit(script)
    stack = RemoteStack(config, folder, "Ctrl-C ends the job")
    return asyncio.run(JobFollower(job, stack, choose_display(as_json=as_json, quiet=False)).run())


class JobFollower(Follower):
    """Shows one job until it has ended."""

    def __init__(self, job: str, stack: RemoteStack, display: Display) -> None:
        super().__init__("slurm", stack, display, silence_s=SILENCE_S)
        self._job = job
        self._said = ""

    async def run(self) -> int:
        self.handle_signals()
        self.say(f"job {self._job} submitted; script {self.stack.folder.path / 'job.sh'}")
        try:
            state = await self._follow()
        finally:
            await self.stop_showing("the job has ended")
        return self._conclude(state)

    async def _follow(self) -> JobState:
        state, asked, ending, handled = JobState("PENDING"), -ASK_INTERVAL_S, 0.0, 0
        while True:
            now = time.monotonic()
            if now - asked >= ASK_INTERVAL_S or self.signalled.is_set():
                state = await self.ask(lambda: job_state(self._job), state)
                asked = now
                self._say_state(state)
                if not state.active:
                    return state
            self.signalled.clear()
            if self.signals > handled:
                handled, ending = self.signals, ending or now
                await asyncio.to_thread(self._end, state, gently=handled == 1)
            if ending and now - ending > END_TIMEOUT_S:
                if now - ending > 2 * END_TIMEOUT_S:
                    raise WaitTimeout(
                        "the end of the job", on=f"Slurm job {self._job}", since=ending
                    )
                await asyncio.to_thread(end_job, self._job, gently=False)
            self._look()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.signalled.wait(), LOOK_INTERVAL_S)

    def _end(self, state: JobState, *, gently: bool) -> None:
        self.say("stopping the job; Ctrl-C again kills it" if gently else "killing the job")
        end_job(self._job, gently=gently and state.state == "RUNNING")

    def _look(self) -> None:
        """Reads what the job's launcher writes; shows the run once its endpoints are known."""
        if self.poller is None and self.stack.refresh({"slurm_job": self._job}):
            self.stack.config = load_service_config(self.stack.folder.config_file)
            security = Security.load(self.stack.config.security)
            self.show(self.stack.config.endpoints, security)
        elif self.poller is not None:
            self.stack.refresh({"slurm_job": self._job})

    def _conclude(self, state: JobState) -> int:
        folder, stack = self.stack.folder, self.stack
        ours = stack.refresh({"slurm_job": self._job})
        summary = read_results(folder.summary_file) if ours else {}
        if ours and stack.state in ("stopped", "failed") and summary:
            error = ArealError(stack.cause) if stack.cause else None
            self.display.summary(stack, summary, error)
            return {"finished": 0, "interrupted": 130}.get(str(summary.get("status")), 1)
        if self.signals:
            return 130
        output = folder.logs / f"slurm-{self._job}.out"
        said = " | ".join(last_lines(output)) or "(empty)"
        raise ArealError(f"job {self._job} ended {state.state}: {output}: {said}")

    def _say_state(self, state: JobState) -> None:
        text = f"job {self._job} {state.state}{f' ({state.reason})' if state.reason else ''}"
        if text != self._said:
            self._said = text
            self.say(text)

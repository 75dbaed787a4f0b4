"""`areal status`, `token`, `down`, `logs`: look at a running stack, or stop it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from areal.config.experiment import load_service_config
from areal.errors import InvalidInput, NotFound, WaitTimeout
from areal.security import Security
from areal.types import TaskState
from areal_launch.processes.descendants import end_tagged, leaders_of
from areal_launch.processes.log_tail import LogTail, humanize
from areal_launch.processes.process import last_lines
from areal_launch.run_folder import RunFolder, find_run
from areal_launch.view.live_view import facts
from areal_launch.view.output import print_json, print_table, say, visible
from areal_launch.view.poller import Snapshot, StackPoller
from areal_launch.view.terminal import make_console
from areal_launch.view.watchdog import ask_waits

STOP_TIMEOUT_S = 90.0
KILL_TIMEOUT_S = 30.0
FOLLOW_INTERVAL_S = 0.3
MOST_LINES = 1_000_000


def look(folder: RunFolder, timeout: float = 5.0) -> Snapshot:
    """Returns the state of a running stack; asks each of its services once."""

    async def ask() -> Snapshot:
        config = load_service_config(folder.config_file)
        processes = folder.read_stack().get("processes", {})
        security = Security.load(config.security)
        poller = StackPoller(config.endpoints, security, with_trainer="trainer" in processes)
        addresses = {name: entry["metrics"] for name, entry in processes.items()}
        try:
            snapshot, (waits, silent) = await asyncio.gather(
                poller.refresh(timeout), ask_waits(addresses, timeout, security.headers())
            )
            snapshot.waits = waits
            snapshot.problems = {**silent, **snapshot.problems}
            return snapshot
        finally:
            await poller.close()

    return asyncio.run(ask())


def show_status(run: Path | None, *, as_json: bool) -> int:
    """Prints the state of a running stack.

    Raises:
        NotFound: The stack is not running.
    """
    folder = find_run(run)
    stack = folder.read_stack()
    if not folder.held():
        raise NotFound(f"{folder.path}: not running (last state: {stack.get('state')})")
    snapshot = look(folder)
    if as_json:
        print_json({**stack, **_as_json(snapshot)})
    else:
        _print_status(folder, stack, snapshot)
    return 0


def show_token(run: Path | None) -> int:
    """Prints the token that a running stack requires."""
    folder = find_run(run)
    if not folder.held():
        raise NotFound(f"{folder.path}: not running, and each start generates a new token")
    token = Security.load(load_service_config(folder.config_file).security).token
    if not token:
        raise NotFound(f"{folder.path}: this stack requires no token")
    say(token)
    return 0


def _as_json(snapshot: Snapshot) -> dict[str, Any]:
    ledger, sync, trainer = snapshot.ledger, snapshot.sync, snapshot.trainer
    return {
        "trainer": trainer and _fields(trainer, "state", "step", "total_steps", "detail"),
        "last_row": snapshot.rows[-1] if snapshot.rows else None,
        "accounting": ledger
        and {
            "submitted": ledger.submitted,
            **{state.value: ledger.counts[state] for state in TaskState},
        },
        "staleness": ledger
        and {
            "mean": ledger.staleness_mean,
            "max": ledger.staleness_max,
            "bound": ledger.max_head_offpolicyness,
        },
        "failures": [asdict(failure) for failure in snapshot.failures],
        "policy_version": sync and sync.current_version,
        "servers": [_fields(s, "url", "state", "version", "cause") for s in snapshot.servers],
        "waits": {name: [asdict(wait) for wait in waits] for name, waits in snapshot.waits.items()},
        "problems": snapshot.problems,
    }


def _fields(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def _print_status(folder: RunFolder, stack: dict[str, Any], snapshot: Snapshot) -> None:
    console = make_console()
    console.print(
        Text(f"{stack['experiment']}/{stack['trial']}", "bold"),
        f"{stack['state']}   launcher pid {stack['launcher']['pid']}   "
        f"dashboard {stack['dashboard']}",
    )
    console.print(f"run folder {folder.path}", style="bright_black")
    if (trainer := snapshot.trainer) is not None:
        doing = f"{trainer.state}: {trainer.detail}" if trainer.detail else trainer.state
        console.print(f"trainer    step {trainer.step}/{trainer.total_steps}, {doing}")
    for label, text in facts(snapshot).items():
        console.print(f"{label:<10} {text}", highlight=False)
    for failure in snapshot.failures:
        told = f"failing    {failure} ({failure.attempts} attempts)"
        console.print(told, style="red", soft_wrap=True, markup=False)
    for server in snapshot.servers:
        cause = f" ({server.cause})" if server.cause else ""
        console.print(f"server     {server.url} {server.state} at version {server.version}{cause}")
    waiting = {name: waits[0] for name, waits in snapshot.waits.items() if waits}
    for name, wait in sorted(waiting.items(), key=lambda each: -each[1].seconds):
        console.print(f"waits      {name}: {wait}", soft_wrap=True, markup=False)
    for service, problem in snapshot.problems.items():
        console.print(Text(service, "yellow").append(f": {visible(problem)}", ""), soft_wrap=True)
    keys = ("state", "pid", "restarts", "address", "metrics")
    print_table(
        ("process", *keys),
        [(name, *(str(each[key]) for key in keys)) for name, each in stack["processes"].items()],
    )


def stop_stack(run: Path | None) -> int:
    """Asks the launcher to end the stack; after a deadline, kills every process of the stack.

    Raises:
        WaitTimeout: A process survived the kill.
    """
    folder = find_run(run)
    stack = folder.read_stack()
    if job := stack["launcher"].get("slurm_job"):
        return _end_slurm_job(folder, str(job))
    pid = int(stack["launcher"]["pid"])
    if not folder.held():
        leftovers = end_tagged(stack["stack_id"], leaders=leaders_of(stack))
        ended = f"; ended {leftovers} leftover processes" if leftovers else ""
        say(f"{folder.path}: not running{ended}")
        return 0
    since = time.monotonic()
    with suppress(ProcessLookupError):  # then its guard holds the lock, and cleans up
        os.kill(pid, signal.SIGTERM)
    if not _wait_released(folder, STOP_TIMEOUT_S):
        say(f"launcher {pid} did not stop in {STOP_TIMEOUT_S:.0f} s: killing the stack")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        end_tagged(stack["stack_id"], leaders=leaders_of(stack))
        if not _wait_released(folder, KILL_TIMEOUT_S):
            raise WaitTimeout(f"the end of {folder.path}", on=f"launcher {pid}", since=since)
    say(f"{folder.path}: stopped in {time.monotonic() - since:.1f} s")
    return 0


def _end_slurm_job(folder: RunFolder, job: str) -> int:
    """Stops a stack that runs in a Slurm job; works from any node."""
    from areal_launch.clusters.slurm import end_job, job_state

    since = time.monotonic()
    for gently, limit in ((True, STOP_TIMEOUT_S), (False, KILL_TIMEOUT_S)):
        if not job_state(job).active:
            break
        end_job(job, gently=gently)
        while job_state(job).active and time.monotonic() - since < limit:
            time.sleep(1.0)
    if job_state(job).active:
        raise WaitTimeout(f"the end of {folder.path}", on=f"Slurm job {job}", since=since)
    say(f"{folder.path}: Slurm job {job} ended")
    return 0


def _wait_released(folder: RunFolder, timeout: float) -> bool:
    """Returns whether the run's lock was released in time: every process has then ended."""
    deadline = time.monotonic() + timeout
    while folder.held():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def show_logs(run: Path | None, name: str | None, *, follow: bool, lines: int) -> int:
    """Prints the end of one log or of all; with `follow`, also new lines until Ctrl-C."""
    if not 0 <= lines <= MOST_LINES:
        raise InvalidInput(f"--lines {lines}: expected 0 to {MOST_LINES:,}")
    folder = find_run(run, live=False)
    files = {file.stem: file for file in sorted(folder.logs.glob("*.log"))}
    if name is not None and name not in files:
        known = ", ".join(files) or "none"
        raise InvalidInput(f"NAME {name!r}: no such log; expected one of {known}")
    chosen = {name: files[name]} if name is not None else files
    tails = {each: LogTail(file, from_end=True) for each, file in chosen.items()}
    width = max((len(each) for each in chosen), default=0)

    def show(each: str, line: str) -> None:
        prefix = f"{each:<{width}} | " if len(chosen) > 1 else ""
        say(prefix + humanize(line))

    for each, file in chosen.items():
        for line in last_lines(file, count=lines, limit=1000 * lines):
            show(each, line)
    while follow:
        for each, tail in tails.items():
            for line in tail.read():
                show(each, line)
        time.sleep(FOLLOW_INTERVAL_S)  # nothing signals that a file has grown
    return 0

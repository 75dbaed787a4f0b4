"""Real children start, end and are started again, or given up with their last words."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from tests.unit.areal_launch.supervised import FAST, Recorder, file_probe, python
from tests.waiting import until

from areal.chassis.bad_input import VERDICT_VARIABLE
from areal.errors import WaitTimeout
from areal_launch.processes import supervisor
from areal_launch.processes.descendants import find_tagged
from areal_launch.processes.process import ProcessSpec
from areal_launch.processes.supervisor import (
    WINDOW_S,
    ProcessState,
    RestartPolicy,
    StackFailure,
    Supervised,
    Supervisor,
)


async def test_start_when_probe_answers_then_up(tmp_path: Path, stack_id: str) -> None:
    flag = tmp_path / "ready"
    code = f"import pathlib, time; pathlib.Path({str(flag)!r}).touch(); time.sleep(60)"
    spec = python("service", code, tmp_path, probe=file_probe(flag))
    process = Supervised(spec, stack_id, FAST, Recorder())
    process.start()
    await process.wait_up(60.0)
    assert process.state is ProcessState.UP
    assert psutil.pid_exists(process.pid)
    pid = process.pid
    await process.stop()
    assert process.state is ProcessState.STOPPED
    assert not psutil.pid_exists(pid)


async def test_service_when_killed_then_restarted_and_reported(
    tmp_path: Path, stack_id: str
) -> None:
    recorder = Recorder()
    process = Supervised(
        python("service", "import time; time.sleep(60)", tmp_path), stack_id, FAST, recorder
    )
    process.start()
    await process.wait_up(60.0)
    first = process.pid
    os.kill(first, signal.SIGKILL)
    await until(
        lambda: process.restarts == 1 and process.state is ProcessState.UP, "the restart", 60.0
    )
    assert process.pid not in (0, first)
    assert recorder.texts("warning") == ["service ended with signal 9; restart 1 of 3 in 0.0 s"]
    await process.stop(0.0)


async def test_service_when_it_keeps_dying_then_given_up_with_its_last_words(
    tmp_path: Path, stack_id: str
) -> None:
    code = "import sys; print('the disk is full', file=sys.stderr); sys.exit(7)"
    process = Supervised(python("service", code, tmp_path), stack_id, FAST, Recorder())
    process.start()
    with pytest.raises(StackFailure, match=r"exit code 7; 3 restarts .* the disk is full"):
        await asyncio.wait_for(asyncio.shield(process.ended), 60.0)
    assert process.restarts == 3
    assert process.state is ProcessState.FAILED
    await process.stop()


async def test_service_when_bad_input_at_first_start_then_not_retried(
    tmp_path: Path, stack_id: str
) -> None:
    code = "import sys; print('--listen: cannot listen there', file=sys.stderr); sys.exit(2)"
    spec = python("service", code, tmp_path, probe=file_probe(tmp_path / "never"))
    process = Supervised(spec, stack_id, FAST, Recorder())
    process.start()
    with pytest.raises(StackFailure, match=r"exit code 2 .*cannot listen there"):
        await process.wait_up(60.0)
    assert process.restarts == 0


async def test_job_when_exit_zero_then_finished(tmp_path: Path, stack_id: str) -> None:
    process = Supervised(python("trainer", "pass", tmp_path, job=True), stack_id, FAST, Recorder())
    process.start()
    assert await asyncio.wait_for(asyncio.shield(process.ended), 60.0) == 0
    assert process.state is ProcessState.FINISHED


async def test_job_when_it_crashes_once_then_restarted_until_finished(
    tmp_path: Path, stack_id: str
) -> None:
    mark = tmp_path / "crashed"
    code = (
        f"import pathlib, sys; m = pathlib.Path({str(mark)!r})\n"
        "if not m.exists(): m.touch(); sys.exit(1)"
    )
    process = Supervised(python("trainer", code, tmp_path, job=True), stack_id, FAST, Recorder())
    process.start()
    assert await asyncio.wait_for(asyncio.shield(process.ended), 60.0) == 0
    assert process.restarts == 1


async def test_job_when_bad_input_then_not_retried(tmp_path: Path, stack_id: str) -> None:
    process = Supervised(
        python("trainer", "raise SystemExit(2)", tmp_path, job=True), stack_id, FAST, Recorder()
    )
    process.start()
    with pytest.raises(StackFailure, match="trainer ended with exit code 2"):
        await asyncio.wait_for(asyncio.shield(process.ended), 60.0)
    assert process.restarts == 0


async def test_job_when_a_rank_under_torchrun_has_bad_input_then_not_retried(
    tmp_path: Path, stack_id: str
) -> None:
    """torchrun itself always ends with code 1."""
    rank = tmp_path / "rank.py"
    rank.write_text(
        "from areal.chassis.bad_input import write_verdict\n"
        "write_verdict(\"actor.path 'nowhere': no config.json there\"); raise SystemExit(2)\n"
    )
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    verdict = tmp_path / "verdict"
    verdict.write_text("of an earlier life")
    spec = ProcessSpec(
        "trainer",
        (sys.executable, *torchrun, str(rank)),
        tmp_path / "trainer.log",
        job=True,
        environment={VERDICT_VARIABLE: str(verdict)},
        verdict=verdict,
    )
    process = Supervised(spec, stack_id, FAST, Recorder())
    process.start()
    with pytest.raises(StackFailure, match=r"^trainer: actor.path 'nowhere': no config.json there"):
        await asyncio.wait_for(asyncio.shield(process.ended), 100.0)
    assert process.restarts == 0


async def test_job_when_it_crashes_then_an_earlier_verdict_does_not_count(
    tmp_path: Path, stack_id: str
) -> None:
    verdict = tmp_path / "verdict"
    verdict.write_text("of an earlier life")
    spec = python("trainer", "raise SystemExit(1)", tmp_path, job=True, verdict=verdict)
    process = Supervised(spec, stack_id, FAST, Recorder())
    process.start()
    with pytest.raises(StackFailure, match="3 restarts within"):
        await asyncio.wait_for(asyncio.shield(process.ended), 60.0)
    assert process.restarts == 3


async def test_start_when_program_is_missing_then_failure_names_it(
    tmp_path: Path, stack_id: str
) -> None:
    spec = ProcessSpec("service", ("/nonexistent/program",), tmp_path / "service.log")
    process = Supervised(spec, stack_id, FAST, Recorder())
    process.start()
    with pytest.raises(StackFailure, match=r"cannot be started: .*nonexistent"):
        await process.wait_up(60.0)


async def test_wait_up_when_never_ready_then_names_process_log_and_last_lines(
    tmp_path: Path, stack_id: str
) -> None:
    code = "import time; print('still loading', flush=True); time.sleep(60)"
    spec = python("inference-0", code, tmp_path, probe=file_probe(tmp_path / "never"))
    process = Supervised(spec, stack_id, FAST, Recorder())
    process.start()
    log = tmp_path / "inference-0.log"
    await until(lambda: log.exists() and log.read_text(), "its first line", 60.0)
    with pytest.raises(
        WaitTimeout, match=r"for readiness on inference-0 \(log .*inference-0.log: still loading"
    ):
        await process.wait_up(0.05)
    await process.stop(0.0)


async def test_or_failure_when_another_process_fails_then_raises(
    tmp_path: Path, stack_id: str
) -> None:
    supervisor = Supervisor(stack_id, FAST, Recorder())
    supervisor.start(
        python("good", "import time; time.sleep(60)", tmp_path),
        python("bad", "raise SystemExit(3)", tmp_path),
    )
    forever: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with pytest.raises(StackFailure, match="bad ended with exit code 3"):
        await asyncio.wait_for(supervisor.or_failure(forever), 60.0)
    await supervisor.stop([["bad"], ["good"]], grace_s=0.0)
    assert not find_tagged(stack_id)


async def test_job_when_it_fails_then_the_restart_names_the_last_error_of_that_life(
    tmp_path: Path, stack_id: str
) -> None:
    code = f"""
import json, os, sys
os.chdir({str(tmp_path)!r})
first = not os.path.exists('lived')
open('lived', 'w').close()
line = {{'event': 'rank_silent', 'level': 'error', 'cause': 'rank 1 sleeps'}}
print(json.dumps(line) if first else '{{}}', flush=True)
print('==== what torchrun draws ====', flush=True)
sys.exit(1)
"""
    report = Recorder()
    job = Supervised(
        python("job", code, tmp_path, job=True),
        stack_id,
        RestartPolicy(max_restarts=2, ready_timeout_s=60.0, first_delay_s=0.02),
        report,
    )
    job.start()
    await until(job.ended.done, "its end", 60.0)
    first, second = report.texts("warning")
    assert first.startswith("job ended with exit code 1: rank_silent cause=rank 1 sleeps; restart")
    assert second.startswith("job ended with exit code 1; restart")
    await job.stop()


async def test_process_when_it_lived_long_before_then_started_again_without_growing_delay(
    tmp_path: Path, stack_id: str
) -> None:
    """The delay grows for what cannot live, not for what is killed now and then."""
    policy = RestartPolicy(
        max_restarts=2000, ready_timeout_s=60.0, first_delay_s=0.1, max_delay_s=600.0, steady_s=0.2
    )
    process = Supervised(
        python("steady", "import time; time.sleep(600)", tmp_path), stack_id, policy, Recorder()
    )
    # As if it had died more often than a power of two can be computed for.
    process._recent.extend([time.monotonic()] * 1500)
    process._in_a_row = 1500
    process.start()
    for _ in range(3):
        await process.wait_up(30.0)
        await asyncio.sleep(0.3)
        pid = process.pid
        os.kill(pid, signal.SIGKILL)
        await until(lambda pid=pid: process.pid not in (0, pid), f"the next after {pid}", 20.0)
    await process.stop(0.0)


async def test_failure_when_of_a_process_started_later_then_it_ends_the_wait(
    tmp_path: Path, stack_id: str
) -> None:
    supervisor = Supervisor(stack_id, FAST, Recorder())
    forever = asyncio.create_task(supervisor.or_failure(asyncio.Event().wait()))
    await asyncio.sleep(0)
    never = {"probe": file_probe(tmp_path / "never")}
    supervisor.start(python("newcomer", "raise SystemExit(2)", tmp_path, **never), vital=False)
    with pytest.raises(StackFailure, match="newcomer"):
        await supervisor.processes["newcomer"].wait_up(30)
    assert not forever.done(), "one that is not vital is given up alone"
    supervisor.start(python("late", "raise SystemExit(2)", tmp_path, **never))
    with pytest.raises(StackFailure, match="late"):
        await asyncio.wait_for(forever, 30)


async def test_service_when_it_was_up_before_it_found_bad_input_then_started_again(
    tmp_path: Path, stack_id: str
) -> None:
    """A dependency that is away for a moment may look like bad input."""
    flag, report = tmp_path / "up", Recorder()
    code = (
        "import os, time\n"
        f"flag = {str(flag)!r}\n"
        "if os.path.exists(flag): time.sleep(600)\n"
        "open(flag, 'w').close(); time.sleep(0.5); raise SystemExit(2)"
    )
    process = Supervised(python("buffer", code, tmp_path), stack_id, FAST, report)
    process.start()
    await until(lambda: process.restarts == 1, "the second life", 60.0)
    await process.wait_up(60.0)
    assert report.texts("warning")[0].startswith("buffer ended with exit code 2; restart 1 of 3")
    assert report.texts("error") == []
    await process.stop(0.0)


async def test_service_when_its_earlier_deaths_are_long_past_then_they_do_not_count(
    tmp_path: Path, stack_id: str
) -> None:
    process = Supervised(python("service", "pass", tmp_path), stack_id, FAST, Recorder())
    process._recent.extend([0.0] * FAST.max_restarts)
    process._up_s = WINDOW_S + 1
    process.start()
    with pytest.raises(StackFailure, match="3 restarts within 10 minutes"):
        await asyncio.wait_for(process.ended, 60)
    assert process.restarts == FAST.max_restarts


class _Mute:
    """A life that ends when it is stopped, and says nothing before."""

    def __init__(self) -> None:
        self.pid = 0
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        return -signal.SIGKILL

    async def stop(self, grace_s: float | None = None) -> int:
        self._ended.set()
        return -signal.SIGKILL

    async def sweep(self) -> None:
        self._ended.set()


@pytest.mark.parametrize("deadline_s", [1.0, 120.0, 1200.0, 86_400.0])
async def test_process_when_it_never_becomes_ready_then_given_up_after_its_restarts(
    deadline_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now, time=time.time)

    async def wait_in_vain(probe: object, what: str, timeout: float) -> None:
        clock.now += timeout
        raise WaitTimeout("readiness", on=what, hint="connection refused")

    started: list[str] = []

    async def spawn(spec: ProcessSpec, stack_id: str) -> _Mute:
        started.append(spec.name)
        return _Mute()

    monkeypatch.setattr(supervisor, "time", clock)
    monkeypatch.setattr(supervisor, "wait_ready", wait_in_vain)
    policy = RestartPolicy(ready_timeout_s=deadline_s, first_delay_s=0.0, max_delay_s=0.0)
    spec = python("trainer", "pass", tmp_path, probe=file_probe(tmp_path / "never"), job=True)
    process = Supervised(spec, "stack", policy, Recorder(), spawn)
    process.start()
    with pytest.raises(StackFailure, match="connection refused"):
        await asyncio.wait_for(process.ended, 60.0)
    assert process.state is ProcessState.FAILED
    assert started == ["trainer"] * (1 + policy.max_restarts)

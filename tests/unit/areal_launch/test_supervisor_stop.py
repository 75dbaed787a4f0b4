"""Real children are ended: in order, whatever they do about signals, with all that they started."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
from tests.unit.areal_launch.supervised import FAST, Recorder, file_probe, python
from tests.waiting import until

from areal_launch.processes.descendants import find_tagged
from areal_launch.processes.supervisor import Supervised, Supervisor


async def test_stop_when_sigterm_is_ignored_then_killed_after_grace(
    tmp_path: Path, stack_id: str
) -> None:
    flag = tmp_path / "ready"
    code = (
        "import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(flag)!r}).touch(); time.sleep(300)"
    )
    spec = python("service", code, tmp_path, probe=file_probe(flag), stop_grace_s=0.3)
    process = Supervised(spec, stack_id, FAST, Recorder())
    process.start()
    await process.wait_up(60.0)
    pid, since = process.pid, time.monotonic()
    await process.stop()
    assert 0.25 < time.monotonic() - since < 50.0
    assert not psutil.pid_exists(pid)


async def test_stop_when_it_is_told_how_long_then_the_own_grace_of_a_process_does_not_count(
    tmp_path: Path, stack_id: str
) -> None:
    flag = tmp_path / "ready"
    code = (
        "import pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"pathlib.Path({str(flag)!r}).touch(); time.sleep(600)"
    )
    spec = python("service", code, tmp_path, probe=file_probe(flag), stop_grace_s=600.0)
    process = Supervised(spec, stack_id, FAST, Recorder())
    process.start()
    await process.wait_up(60.0)
    await asyncio.wait_for(process.stop(0.1), 60)
    assert not find_tagged(stack_id)


async def test_stop_when_stopped_by_sigstop_then_ended(tmp_path: Path, stack_id: str) -> None:
    spec = python("service", "import time; time.sleep(600)", tmp_path, stop_grace_s=600.0)
    process = Supervised(spec, stack_id, FAST, Recorder())
    process.start()
    await process.wait_up(60.0)
    os.kill(process.pid, signal.SIGSTOP)
    await asyncio.wait_for(process.stop(), 60)  # it is continued, and hears the SIGTERM
    assert not find_tagged(stack_id)


async def test_death_when_grandchild_has_its_own_session_then_swept(
    tmp_path: Path, stack_id: str
) -> None:
    """As torchrun starts its workers."""
    flag = tmp_path / "grandchild"
    code = (
        "import pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'], "
        "start_new_session=True)\n"
        f"pathlib.Path({str(flag)!r}).write_text(str(child.pid)); time.sleep(300)"
    )
    process = Supervised(python("trainer", code, tmp_path, job=True), stack_id, FAST, Recorder())
    process.start()
    await until(lambda: flag.exists() and flag.read_text(), "the grandchild", 60.0)
    orphan = psutil.Process(int(flag.read_text()))
    await until(lambda: process.pid, "what its keeper says", 60.0)
    os.kill(process.pid, signal.SIGKILL)
    await until(lambda: not orphan.is_running(), "the end of the orphan", 60.0)
    await process.stop(0.0)
    assert not find_tagged(stack_id)


async def test_stop_when_ordered_then_stage_by_stage(tmp_path: Path, stack_id: str) -> None:
    order = tmp_path / "order"
    code = (
        "import signal, sys, time\n"
        "def end(*_): open({file!r}, 'a').write({name!r} + ' '); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end); open({flag!r}, 'w'); time.sleep(300)"
    )
    supervisor = Supervisor(stack_id, FAST, Recorder())
    names = ["redis", "buffer", "rollout"]
    for name in names:
        flag = tmp_path / f"{name}.flag"
        text = code.format(file=str(order), name=name, flag=str(flag))
        supervisor.start(python(name, text, tmp_path, probe=file_probe(flag)))
    await supervisor.wait_up(names, 60.0)
    await supervisor.stop([["rollout"], ["buffer"]])
    assert order.read_text().split() == ["rollout", "buffer", "redis"]

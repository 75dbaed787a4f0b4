"""Real children that live and do not answer: which are replaced, and which are let be."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
from pathlib import Path

import psutil
from tests.ports import free_port
from tests.unit.areal_launch.supervised import FAST, Recorder
from tests.waiting import until

from areal_launch.processes.probes import http_probe
from areal_launch.processes.process import ProcessSpec
from areal_launch.processes.supervisor import ProcessState, Supervised

# As the trainer: an HTTP server in a thread with a loop of its own; the main thread does the rest.
ANSWERS = """
import asyncio, pathlib, sys, threading, time
from aiohttp import web

async def serve():
    async def healthz(_):
        return web.json_response({})
    app = web.Application()
    app.add_routes([web.get("/healthz", healthz)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", int(sys.argv[1])).start()
    await asyncio.Event().wait()

threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()
"""


def answering(log: Path, main: str) -> ProcessSpec:
    port = free_port()
    return ProcessSpec(
        "trainer",
        (sys.executable, "-c", ANSWERS + main, str(port)),
        log / "trainer.log",
        probe=http_probe("127.0.0.1", port, "/healthz"),
        job=True,
    )


QUICK = dataclasses.replace(FAST, silent_s=1.0)


async def test_job_when_stopped_by_sigstop_then_killed_and_started_again_by_name(
    tmp_path: Path, stack_id: str
) -> None:
    recorder = Recorder()
    process = Supervised(answering(tmp_path, "time.sleep(100)"), stack_id, QUICK, recorder)
    process.start()
    await process.wait_up(60.0)
    stopped = process.pid
    os.kill(stopped, signal.SIGSTOP)
    await until(
        lambda: process.restarts == 1 and process.state is ProcessState.UP, "the restart", 60.0
    )
    assert process.pid not in (0, stopped)
    assert not psutil.pid_exists(stopped)
    (text,) = recorder.texts("warning")
    assert "trainer gave no sign of life for" in text
    assert f"process {stopped} is stopped (SIGSTOP); restart 1 of 3" in text
    await process.stop(0.0)


async def test_job_when_stopped_for_less_then_left_alone(tmp_path: Path, stack_id: str) -> None:
    policy = dataclasses.replace(FAST, silent_s=600.0)
    process = Supervised(answering(tmp_path, "time.sleep(100)"), stack_id, policy, Recorder())
    process.start()
    await process.wait_up(60.0)
    pid = process.pid
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(0.5)
    os.kill(pid, signal.SIGCONT)
    await asyncio.sleep(0.5)
    assert (process.pid, process.restarts) == (pid, 0)
    await process.stop(0.0)


async def test_job_when_it_hangs_with_its_server_then_the_cause_says_what_did_not_answer(
    tmp_path: Path, stack_id: str
) -> None:
    hang = tmp_path / "hang"
    main = f"""
while not pathlib.Path({str(hang)!r}).exists():
    time.sleep(0.01)
import os
[os.close(fd) for fd in range(3, 64) if os.path.exists(f"/proc/self/fd/{{fd}}")]
time.sleep(100)
"""
    recorder = Recorder()
    process = Supervised(answering(tmp_path, main), stack_id, QUICK, recorder)
    process.start()
    await process.wait_up(60.0)
    hang.touch()
    await until(lambda: process.restarts >= 1, "the restart", 60.0)
    assert "trainer gave no sign of life for" in recorder.texts("warning")[0]
    await process.stop(0.0)


async def test_job_when_its_main_thread_computes_imports_and_compiles_then_it_lives(
    tmp_path: Path, stack_id: str
) -> None:
    """What a trainer's main thread does for long: none of it may look like death."""
    done = tmp_path / "done"
    main = f"""
import torch
until = time.monotonic() + 4.0
while time.monotonic() < until:
    sum(range(200_000))                      # Python that never yields by itself
    sorted(range(300_000), key=lambda n: -n) # one long call into C
    torch.randn(500, 500) @ torch.randn(500, 500)
compile("x = 1;" * 100_000, "long", "exec")
pathlib.Path({str(done)!r}).touch()
"""
    policy = dataclasses.replace(FAST, silent_s=8.0)
    process = Supervised(answering(tmp_path, main), stack_id, policy, Recorder())
    process.start()
    assert await asyncio.wait_for(asyncio.shield(process.ended), 110.0) == 0
    assert process.restarts == 0
    assert done.exists()

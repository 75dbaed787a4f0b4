"""A service of this project as a real process, for tests."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from tests.ports import free_port

ROOT = Path(__file__).parents[1]


class ServiceProcess:
    """A started service: its addresses, its log, its end."""

    def __init__(self, process: asyncio.subprocess.Process, listen: str, metrics: str, log: Path):
        self.process, self.listen, self.metrics, self.log = process, listen, metrics, log

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        """What it has logged."""
        return self.log.read_text()

    async def stop(self, signum: int = signal.SIGTERM, deadline_s: float = 60.0) -> int:
        """Signals and reaps; returns the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signum)
        return await asyncio.wait_for(self.process.wait(), deadline_s)


@asynccontextmanager
async def service_process(
    module: str,
    folder: Path,
    config: str,
    *overrides: str,
    ready_s: float = 120.0,
    host: str = "127.0.0.1",
    before: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[ServiceProcess]:
    """Runs `python -m MODULE` until it serves; kills it at the end if it still runs.

    Args:
        module: The service's package.
        folder: For its configuration and its log.
        config: The experiment file's content.
        overrides: key=value.
        ready_s: Until it serves.
        host: It listens on.
        before: A command that becomes the service, e.g. with other limits.
        environment: Added to ours.
    """
    file = folder / f"{module}.yaml"
    file.write_text(config)
    log = folder / f"{module}.log"
    listen, metrics = f"{host}:{free_port()}", f"127.0.0.1:{free_port()}"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(*before, sys.executable),
            *("-m", module, "--config", str(file), "--listen", listen, "--metrics", metrics),
            *overrides,
            stdout=output,
            stderr=output,
            cwd=folder,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT / "services"),
                "OMP_NUM_THREADS": "1",
                "PYTHONUNBUFFERED": "",  # as most systems start a program
                **(environment or {}),
            },
        )
    service = ServiceProcess(process, listen, metrics, log)
    try:
        async with asyncio.timeout(ready_s), aiohttp.ClientSession() as http:
            while not await _ready(http, f"http://{metrics}/healthz"):
                assert process.returncode is None, service.text()
                await asyncio.sleep(0.05)
        yield service
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _ready(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as reply:
            return reply.status == 200
    except aiohttp.ClientError:
        return False

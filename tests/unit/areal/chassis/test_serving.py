"""What a service says of itself while it starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.ports import free_port

from areal.chassis import service
from areal.chassis.service import Server, ServiceContext
from areal.errors import CannotStart
from areal.security import Security, SecurityConfig


class Worker(Server):
    """Starts a loop, and is ready when the loop is, or has failed."""

    def __init__(self, context: ServiceContext, *, fails: bool) -> None:
        self._context, self._fails = context, fails
        self._ready = asyncio.Event()

    async def start(self) -> None:
        loop = self._context.background.keep(self._run(), "worker")
        ready = asyncio.ensure_future(self._ready.wait())
        await asyncio.wait({loop, ready}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()

    async def _run(self) -> None:
        if self._fails:
            raise CannotStart("there is nothing to work with")
        self._ready.set()
        await asyncio.sleep(0.1)
        raise CannotStart("the end of the test")


@pytest.mark.parametrize("fails", [True, False])
async def test_service_when_a_loop_fails_at_the_start_then_it_never_says_that_it_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    said: list[bool] = []
    serve = service.Listeners.serve

    async def record(self: service.Listeners, serving: bool) -> None:
        said.append(serving)
        await serve(self, serving)

    monkeypatch.setattr(service.Listeners, "serve", record)
    code = await service._serve(
        "worker",
        lambda context: Worker(context, fails=fails),
        Security.load(SecurityConfig()),
        f"127.0.0.1:{free_port()}",
        f"127.0.0.1:{free_port()}",
        grace_s=1.0,
    )
    assert code == 1
    assert (True in said) is not fails
    assert said[-1] is False

"""Commands to a running launcher, through its socket."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import pytest

from areal.errors import ArealError, InvalidInput, NotFound, Unavailable, WaitTimeout
from areal_launch.stack.control_socket import ControlSocket, ask


class Handler:
    """Does what the request names."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.finished: list[str] = []

    async def __call__(self, request: dict[str, Any], say) -> str:
        name = str(request.get("do"))
        say(f"{name} begins")
        if name == "wait":
            await self.gate.wait()
        if name == "refuse":
            raise InvalidInput("count 0: expected 1 or more")
        if name == "fail":
            raise ArealError("inference-2 did not come up")
        self.finished.append(name)
        return f"{name} done"


@pytest.fixture
async def socket(tmp_path: Path):
    folder = tmp_path / ("deep-" * 20) / ("deeper-" * 15)  # beyond the 108 bytes of an address
    folder.mkdir(parents=True)
    handler = Handler()
    control = ControlSocket(folder / "control.sock", handler)
    await control.open()
    yield folder / "control.sock", handler, control
    await control.close()
    assert not (folder / "control.sock").exists()


async def test_ask_when_the_path_is_long_then_what_is_said_and_the_last_word_come(socket):
    file, _, _ = socket
    said: list[str] = []
    assert await ask(file, {"do": "work"}, said.append, timeout=60) == "work done"
    assert said == ["work begins"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_ask_when_refused_or_failed_then_the_error_says_which(socket):
    file, _, _ = socket
    with pytest.raises(InvalidInput, match="count 0"):
        await ask(file, {"do": "refuse"}, print, timeout=60)
    with pytest.raises(ArealError, match="did not come up") as caught:
        await ask(file, {"do": "fail"}, print, timeout=60)
    assert not isinstance(caught.value, InvalidInput)


async def test_request_when_malformed_then_refused(socket):
    file, _, _ = socket
    with pytest.raises(InvalidInput, match="expected a JSON object"):
        await ask(file, ["no object"], print, timeout=60)


async def test_client_when_it_goes_away_then_what_it_asked_for_goes_on(socket):
    file, handler, _ = socket
    with pytest.raises(WaitTimeout, match="launcher"):
        await ask(file, {"do": "wait"}, print, timeout=0.2)
    handler.gate.set()
    assert await ask(file, {"do": "work"}, print, timeout=60) == "work done"
    assert handler.finished == ["wait", "work"], "one after the other"


async def test_ask_when_the_stack_ends_meanwhile_then_it_says_so(socket):
    file, _, control = socket
    begun = asyncio.Event()
    asking = asyncio.create_task(ask(file, {"do": "wait"}, lambda _: begun.set(), timeout=100))
    async with asyncio.timeout(60):
        await begun.wait()
    await control.close()
    with pytest.raises(Unavailable, match="stopped before it answered"):
        await asking


async def test_ask_when_nobody_listens_then_not_found(tmp_path):
    with pytest.raises(NotFound, match="no launcher listens there"):
        await ask(tmp_path / "control.sock", {}, print, timeout=1)


async def test_open_when_a_dead_launcher_left_its_socket_then_taken_over(tmp_path):
    file = tmp_path / "control.sock"
    file.touch()
    control = ControlSocket(file, Handler())
    await control.open()
    assert await ask(file, {"do": "work"}, print, timeout=60) == "work done"
    await control.close()

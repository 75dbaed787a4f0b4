"""What kind of failure a server's answer is: it decides how soon the server is asked again."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from tests.unit.areal_weight_sync.coordinator_rig import JOINING, SERVING, rig_of

from areal_weight_sync.engine.base import EngineError, Fault
from areal_weight_sync.engine.http import HttpEngine, open_session


class Server:
    """Answers everything alike."""

    def __init__(self) -> None:
        self.answer = web.Response(status=503)

    async def handle(self, _: web.Request) -> web.Response:
        return web.Response(status=self.answer.status, body=self.answer.body)


@pytest.fixture
async def server() -> AsyncIterator[tuple[Server, HttpEngine]]:
    served, app = Server(), web.Application()
    app.router.add_route("*", "/{path:.*}", served.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with open_session({}) as session:
            yield served, HttpEngine(f"http://127.0.0.1:{runner.addresses[0][1]}", session)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("status", "body", "fault"),
    [
        (503, b"Service Unavailable", Fault.UNREACHABLE),  # it still loads its model
        (500, b"CUDA error", Fault.HTTP_STATUS),
        (404, b"Not Found", Fault.HTTP_STATUS),
        (200, b"<html>", Fault.GARBAGE),
        (200, b"{}", Fault.GARBAGE),
    ],
)
async def test_answer_when_it_is_no_good_then_its_kind_is_told(
    server: tuple[Server, HttpEngine], status: int, body: bytes, fault: Fault
) -> None:
    served, engine = server
    served.answer = web.Response(status=status, body=body)
    for call in (engine.boot_id(), engine.weight_version(), engine.running()):
        with pytest.raises(EngineError) as caught:
            await call
        assert caught.value.fault is fault
        assert "\n" not in str(caught.value)


async def test_newcomer_when_it_is_not_up_yet_then_it_is_awaited_and_never_quarantined(
    tmp_path,
) -> None:
    async with rig_of(tmp_path, backoff_s=600.0, backoff_max_s=600.0) as rig:
        await rig.publish_model()
        rig.engine("a").down = EngineError(Fault.UNREACHABLE, "/server_info: HTTP 503: loading")
        rig.register("a")
        await rig.until(lambda: len(rig.engine("a").calls) > 3, "several tries")
        assert rig.server("a").state is JOINING
        assert rig.server("a").cause == "not up yet: /server_info: HTTP 503: loading"
        assert rig.observer.failures == []
        rig.engine("a").down = None
        await rig.at("a", SERVING, 0)

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.areal_weight_sync.coordinator_rig import rig_of

from areal.errors import InvalidInput
from areal.v1 import weight_sync_service_pb2 as pb
from areal.weights.servers import ServerState
from areal_weight_sync.engine.base import EngineError, Fault
from areal_weight_sync.engine.http import HttpEngine, normalize_url, open_session
from areal_weight_sync.servicer import WeightSyncService


@pytest.mark.parametrize(
    "host", ["a..b", "x" * 64, "\u00e9..b", "a b", "a\x00b", ".", "%", "x." * 200]
)
def test_url_when_its_host_is_no_name_then_refused(host: str) -> None:
    with pytest.raises(InvalidInput, match="url "):
        normalize_url(f"http://{host}:80")


@pytest.mark.parametrize("host", ["localhost", "10.0.0.1", "[::1]", "sglang-0.pool.svc", "a_b"])
def test_url_when_its_host_is_a_name_then_taken(host: str) -> None:
    assert normalize_url(f"http://{host}:80") == (f"{host}:80", f"http://{host}:80")


async def test_engine_when_a_host_cannot_be_looked_up_then_unreachable_and_no_other_error() -> None:
    async with open_session({}) as session:
        with pytest.raises(EngineError) as caught:
            await HttpEngine("http://a..b:80", session).weight_version()
    assert caught.value.fault is Fault.UNREACHABLE


@pytest.mark.parametrize("named", ["10.0.0.7:30000", "http://10.0.0.7:30000/"])
async def test_drain_when_a_server_is_named_by_its_id_or_its_url_then_it_leaves(
    tmp_path: Path, named: str
) -> None:
    async with rig_of(tmp_path) as rig:
        servicer: Any = WeightSyncService()
        servicer.coordinator = rig.coordinator
        url = pb.RegisterServerRequest(url="http://10.0.0.7:30000")
        answer = await servicer.RegisterServer(url, None)
        assert answer.server.server_id == "10.0.0.7:30000"
        rig.engine("10.0.0.7:30000").requests = 1
        request = pb.DrainServerRequest(server_id=named)
        request.deadline.FromSeconds(600)
        await servicer.DrainServer(request, None)
        assert rig.server("10.0.0.7:30000").state is ServerState.DRAINING

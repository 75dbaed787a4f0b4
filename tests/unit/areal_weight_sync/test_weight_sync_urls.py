from __future__ import annotations

import pytest

from areal.errors import InvalidInput
from areal_weight_sync.engine import EngineError, Fault
from areal_weight_sync.http_engine import HttpEngine, normalize_url, open_session


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

"""The stand-in for a metrics adapter in the scarce run reads a real /metrics, with its token."""

from __future__ import annotations

import asyncio
import urllib.error

import pytest
from aiohttp import web
from prometheus_client import CollectorRegistry, Gauge, generate_latest
from tests.kubernetes import metrics_api

METRIC = "areal_rollout_recommended_inference_servers"
PATH = f"/apis/{metrics_api.VERSION}/namespaces/areal/{METRIC}?labelSelector="
SELECTOR = "namespace%3Dareal%2Cservice%3D127.0.0.1"


async def asked(value, monkeypatch):
    """The adapter's reply where a service says `value` to a caller with its token."""
    registry = CollectorRegistry()
    Gauge(METRIC, "servers", registry=registry).set(value)

    async def metrics(request):
        allowed = request.headers.get("Authorization") == "Bearer right"
        return web.Response(body=generate_latest(registry), status=200 if allowed else 401)

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        monkeypatch.setattr(metrics_api, "METRICS_PORT", runner.addresses[0][1])
        return await asyncio.to_thread(metrics_api.answer, PATH + SELECTOR)
    finally:
        await runner.cleanup()


async def test_adapter_when_the_service_recommends_then_it_says_how_many(monkeypatch):
    monkeypatch.setenv("AREAL_TOKEN", "right")
    (item,) = (await asked(6, monkeypatch))["items"]
    assert item["metricName"] == METRIC
    assert item["value"] == "6"


async def test_adapter_when_nothing_is_known_yet_then_it_has_no_item(monkeypatch):
    monkeypatch.setenv("AREAL_TOKEN", "right")
    assert (await asked(0, monkeypatch))["items"] == []


async def test_adapter_when_the_token_is_wrong_then_it_says_so(monkeypatch):
    monkeypatch.setenv("AREAL_TOKEN", "wrong")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        await asked(6, monkeypatch)

"""What only Kubernetes has: readiness that is told back, endpoints that terminate, watches."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from tests.contract.discovery_worlds import CONDITION, KubernetesWorld, Stack, running

from areal_weight_sync.engine.base import EngineError, Fault


@pytest.fixture
async def kube(tmp_path, monkeypatch) -> AsyncIterator[Stack]:
    async with running(KubernetesWorld(), tmp_path, monkeypatch) as stack:
        yield stack


def condition(stack: Stack, address: str) -> str:
    conditions = stack.world.api.pods["pod-" + address.replace(".", "-")]
    return conditions.get(CONDITION, {}).get("status", "")


async def test_readiness_when_weights_are_current_then_true_and_when_quarantined_then_false(kube):
    kube.engine("10.0.0.1").down = EngineError(Fault.UNREACHABLE, "cannot connect")
    await kube.start()
    kube.world.add("10.0.0.1")
    await kube.until(lambda: condition(kube, "10.0.0.1") == "False", "not up yet: not ready")
    kube.engine("10.0.0.1").down = None
    await kube.until(lambda: condition(kube, "10.0.0.1") == "True", "serving: ready")
    kube.engine("10.0.0.1").down = EngineError(Fault.HTTP_STATUS, "HTTP 500: CUDA error")
    await kube.until(lambda: condition(kube, "10.0.0.1") == "False", "quarantined: not ready")
    said = kube.world.api.pods["pod-10-0-0-1"][CONDITION]
    assert said["reason"] == "Quarantined"
    assert "CUDA error" in said["message"]


async def test_readiness_when_another_pod_takes_the_address_then_it_is_told_too(kube):
    await kube.start()
    kube.world.api.add("10.0.0.1", "pod-a")
    await kube.until(lambda: CONDITION in kube.world.api.pods["pod-a"], "first pod")
    kube.world.api.add("10.0.0.1", "pod-b")
    await kube.until(lambda: CONDITION in kube.world.api.pods["pod-b"], "second pod")
    assert kube.world.api.pods["pod-b"][CONDITION]["status"] == "True"


async def test_readiness_when_the_api_refuses_for_a_while_then_it_is_said_later(kube):
    await kube.start()
    kube.world.add("10.0.0.1")
    await kube.until_serving("10.0.0.1")
    await kube.until(lambda: condition(kube, "10.0.0.1") == "True", "ready")
    kube.world.api.mode = "403"
    kube.engine("10.0.0.1").down = EngineError(Fault.HTTP_STATUS, "HTTP 500")
    await kube.until(lambda: not kube.serving(), "quarantined")
    await asyncio.sleep(0.3)
    assert condition(kube, "10.0.0.1") == "True"
    kube.world.api.mode = "good"
    await kube.until(lambda: condition(kube, "10.0.0.1") == "False", "said at last")


async def test_endpoint_when_it_terminates_then_it_drains_before_it_vanishes(kube):
    await kube.start()
    kube.world.add("10.0.0.1")
    kube.world.add("10.0.0.2")
    await kube.until_serving("10.0.0.1", "10.0.0.2")
    kube.world.api.terminate("10.0.0.2")
    await kube.until_serving("10.0.0.1")


async def test_watch_when_the_server_ends_it_then_it_goes_on_without_a_list(kube):
    await kube.start()
    kube.world.add("10.0.0.1")
    await kube.until_serving("10.0.0.1")
    api = kube.world.api
    api.bookmark()
    watches, lists = api.watches, api.lists
    api.cut()
    await kube.until(lambda: api.watches > watches, "watched again")
    kube.world.add("10.0.0.2")
    await kube.until_serving("10.0.0.1", "10.0.0.2")
    assert api.lists == lists


async def test_watch_when_its_version_is_gone_then_it_lists_again(kube):
    await kube.start()
    kube.world.add("10.0.0.1")
    await kube.until_serving("10.0.0.1")
    api = kube.world.api
    lists = api.lists
    api.compact()
    await kube.until(lambda: api.lists > lists, "listed again")
    kube.world.add("10.0.0.2")
    await kube.until_serving("10.0.0.1", "10.0.0.2")


async def test_slice_when_it_is_deleted_then_its_servers_leave(kube):
    await kube.start()
    kube.world.add("10.0.0.1")
    await kube.until_serving("10.0.0.1")
    kube.world.api.delete_slice()
    await kube.until(lambda: not kube.coordinator.servers(), "forgotten")
    assert set(kube.world.api.selectors) == {"kubernetes.io/service-name=sglang"}

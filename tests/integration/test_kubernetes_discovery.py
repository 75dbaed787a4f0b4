"""Discovery against a real cluster, the one that the variable AREAL_TEST_KUBECONFIG names.

A namespace of its own, and a node without a kubelet that nothing else is scheduled on: its pods get
an address by hand, so that the cluster's own controllers write the EndpointSlices and no image is
needed. Servers are fakes in memory.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.contract.discovery_worlds import CONDITION, Stack, World, running

from areal_weight_sync.discovery.base import Source
from areal_weight_sync.discovery.sources import make_sources

KUBECONFIG = os.environ.get("AREAL_TEST_KUBECONFIG", "")
pytestmark = pytest.mark.skipif(
    not KUBECONFIG, reason="AREAL_TEST_KUBECONFIG names no cluster to try it on"
)


class ClusterWorld(World):
    discovers = True

    async def start(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("KUBECONFIG", KUBECONFIG)
        monkeypatch.setattr(
            "kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", KUBECONFIG
        )
        from kubernetes.aio import client, config

        configuration = client.Configuration()
        await config.load_kube_config(KUBECONFIG, client_configuration=configuration)
        self.client = client.ApiClient(configuration)
        self.core = client.CoreV1Api(self.client)
        self.namespace = f"areal-test-{uuid.uuid4().hex[:8]}"
        self.entry = f"kubernetes://{self.namespace}/sglang"
        node = {
            "metadata": {"name": self.namespace},
            "spec": {
                "unschedulable": True,
                "taints": [{"key": "areal.io/test", "effect": "NoExecute"}],
            },
        }
        await self.core.create_node(node)
        await self.core.create_namespace({"metadata": {"name": self.namespace}})
        service = {
            "metadata": {"name": "sglang"},
            "spec": {
                "clusterIP": "None",
                "selector": {"app": "sglang"},
                "ports": [{"name": "http", "port": 30000}],
            },
        }
        await self.core.create_namespaced_service(self.namespace, service)

    async def stop(self) -> None:
        for pod in (await self.core.list_namespaced_pod(self.namespace)).items:
            await self.delete(pod.metadata.name, grace_s=0)
        await self.core.delete_namespace(self.namespace)
        await self.core.delete_node(self.namespace)
        await self.client.close()

    def sources(self) -> list[Source]:
        return make_sources([self.entry])

    async def create(self, name: str, address: str) -> None:
        pod = {
            "metadata": {"name": name, "labels": {"app": "sglang"}},
            "spec": {
                "nodeName": self.namespace,
                "tolerations": [{"operator": "Exists"}],
                "automountServiceAccountToken": False,
                "containers": [{"name": "sglang", "image": "none"}],
                "readinessGates": [{"conditionType": CONDITION}],
            },
        }
        for _ in range(100):  # the namespace's service account takes a moment
            accounts = await self.core.list_namespaced_service_account(self.namespace)
            if any(each.metadata.name == "default" for each in accounts.items):
                break
            await asyncio.sleep(0.2)
        await self.core.create_namespaced_pod(self.namespace, pod)
        status = {"status": {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}]}}
        await self.core.patch_namespaced_pod_status(
            name, self.namespace, status, _content_type="application/strategic-merge-patch+json"
        )

    async def delete(self, name: str, grace_s: int) -> None:
        await self.core.delete_namespaced_pod(name, self.namespace, grace_period_seconds=grace_s)

    async def condition(self, name: str) -> str:
        pod = await self.core.read_namespaced_pod(name, self.namespace)
        found = [c for c in pod.status.conditions or [] if c.type == CONDITION]
        return found[0].status if found else ""


@pytest.fixture
async def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Stack]:
    async with running(ClusterWorld(), tmp_path, monkeypatch) as stack:
        yield stack


async def until_condition(stack: Stack, pod: str, status: str) -> None:
    end = time.monotonic() + 90
    while (found := await stack.world.condition(pod)) != status:
        assert time.monotonic() < end, f"{CONDITION} of {pod} is {found!r}, expected {status!r}"
        await asyncio.sleep(0.1)


async def test_pods_when_they_come_and_go_then_servers_follow_and_conditions_are_true(stack):
    world = stack.world
    await stack.start()
    await world.create("sglang-a", "10.1.0.1")
    await stack.until_serving("10.1.0.1")
    await until_condition(stack, "sglang-a", "True")
    await world.create("sglang-b", "10.1.0.2")
    await stack.until_serving("10.1.0.1", "10.1.0.2")
    await world.delete("sglang-a", grace_s=0)
    await stack.until_serving("10.1.0.2")
    await stack.until(lambda: len(stack.coordinator.servers()) == 1, "forgotten")


async def test_pod_when_it_is_being_deleted_then_its_server_drains(stack):
    world = stack.world
    await stack.start()
    await world.create("sglang-a", "10.1.0.1")
    await world.create("sglang-b", "10.1.0.2")
    await stack.until_serving("10.1.0.1", "10.1.0.2")
    await world.delete("sglang-b", grace_s=300)  # no kubelet: it stays, terminating
    await stack.until_serving("10.1.0.1")
    assert (await world.core.read_namespaced_pod("sglang-b", world.namespace)).metadata

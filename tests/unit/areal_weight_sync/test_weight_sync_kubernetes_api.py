"""What the client of Kubernetes costs, and when."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import asyncio, sys
from areal_weight_sync.discovery.kubernetes_api import ApiError, KubernetesApi

async def call(api):
    for coroutine in (api.slices(), api.patch_condition("pod", {})):
        try:
            await coroutine
        except ApiError:
            pass
    await api.close()

api = KubernetesApi("here", "sglang")
before = set(sys.modules)
asyncio.run(call(api))
print(*sorted(m for m in set(sys.modules) - before if "kubernetes.aio.client.api." in m))
"""


def test_client_when_it_calls_then_it_imports_nothing_while_the_loop_serves(tmp_path) -> None:
    config = tmp_path / "kubeconfig"
    config.write_text(
        "{apiVersion: v1, kind: Config, current-context: c, users: [{name: u, user: {token: t}}],"
        "contexts: [{name: c, context: {cluster: k, user: u}}],"
        "clusters: [{name: k, cluster: {server: 'http://127.0.0.1:9'}}]}"
    )
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=100,
        env={"PYTHONPATH": "services", "KUBECONFIG": str(config), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    # A group of the API takes most of a second to import: every probe would wait for it.
    assert done.stdout.split() == []

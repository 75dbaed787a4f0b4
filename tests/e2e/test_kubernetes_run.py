"""`areal run --on kubernetes` on the cluster of KUBECONFIG (`make e2e-kubernetes-run`)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.e2e.cluster_runs import ROOT, arguments, check_books
from tests.integration.stack_tools import areal

HELM = shutil.which("helm", path=str(Path(sys.executable).parent)) or shutil.which("helm")

pytestmark = [
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        not os.environ.get("AREAL_TEST_KUBERNETES"), reason="make e2e-kubernetes-run runs this"
    ),
    pytest.mark.skipif(
        HELM is None or shutil.which("kubectl") is None, reason="helm or kubectl is missing"
    ),
]


@pytest.fixture
def namespace() -> Iterator[str]:
    name = f"areal-run-{uuid.uuid4().hex[:8]}"
    yield name
    command = ["kubectl", "delete", "namespace", name, "--wait=false", "--ignore-not-found"]
    subprocess.run(command, check=True, timeout=60)


def test_kubernetes_when_it_has_trained_then_the_books_balance_and_the_release_is_gone(
    namespace: str, tmp_path: Path
) -> None:
    """Images areal/*:$AREAL_TAG (dev) are on the node, whose folder /var/lib is writable."""
    folder, steps = f"/var/lib/{namespace}", 5
    small = {"requests": {"cpu": 0, "memory": "64Mi"}}
    components = ("gateway", "rollout", "reward", "buffer", "weightSync", "nats")
    values = {
        "image": {"repository": "areal", "tag": os.environ.get("AREAL_TAG", "dev")},
        "storage": {"hostPath": f"{folder}/data"},
        "redis": {"hostPath": f"{folder}/redis", "resources": small},
        **{name: {"resources": small} for name in components},
        "trainer": {"resources": small | {"limits": {"memory": "3Gi"}}},
        "sglang": {"resources": small | {"limits": {"memory": "2Gi"}}},
    }
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(values))
    done = areal(
        *("run", "--on", "kubernetes", "--json"),
        *arguments(Path("models/tiny"), "cluster", steps, "sglang:d1+fsdp:d1"),
        *("warm_start_steps=5", f"stack.kubernetes.namespace={namespace}"),
        f"stack.kubernetes.chart={ROOT / 'charts' / 'areal'}",
        f"stack.kubernetes.values=[{file}]",
        cwd=tmp_path,
        timeout=1000.0,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["step"] for line in lines if line["event"] == "step"] == list(range(1, steps + 1))
    summary = json.loads((tmp_path / "runs/arithmetic/cluster/summary.json").read_text())
    assert {**summary, "event": "summary"} == lines[-1]
    assert summary["status"] == "finished"
    check_books(summary, steps)
    listed = subprocess.run(
        [str(HELM), "-n", namespace, "list", "--all", "--short"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert listed.stdout.split() == []

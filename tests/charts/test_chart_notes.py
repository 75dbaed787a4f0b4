"""What `helm install` says at its end."""

import tempfile
from pathlib import Path

from tests.charts.fake_cluster import cluster
from tests.charts.rendering import CHART, IMAGES, NAMESPACE, helm

JOB = (*IMAGES, "--set", "trainer.workload=Job")


# A release that helm finds, without a cluster that would have kept it.
RELEASE = """
- name: areal
  namespace: {namespace}
  version: {version}
  info: {{status: deployed}}
  manifest: ""
  chart: {{metadata: {{name: areal, version: 0.1.0, apiVersion: v2}}}}
"""


def _shown(command, arguments, **variables):
    """What helm prints of a release that it would make in an empty cluster."""
    with cluster() as address:
        server = ("--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", address)
        place = ("--namespace", NAMESPACE, *server)
        done = helm(command, "areal", str(CHART), *place, *JOB, *arguments, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout


def notes(*arguments):
    """As an installation shows them."""
    return _shown("install", arguments).partition("\nNOTES:\n")[2]


def upgraded(revision):
    """All that an upgrade to that revision shows."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "releases.yaml"
        file.write_text(RELEASE.format(namespace=NAMESPACE, version=revision - 1))
        memory = {"HELM_DRIVER": "memory", "HELM_MEMORY_DRIVER_DATA": str(file)}
        return _shown("upgrade", (), **memory)


def test_notes_when_installed_then_they_say_how_to_see_what_keeps_pods_from_starting():
    said = notes()
    (command,) = [line for line in said.splitlines() if "custom-columns" in line]
    assert f"kubectl -n {NAMESPACE} get pods -l app.kubernetes.io/instance=areal" in command
    for part in ("initContainerStatuses", "containerStatuses", "spec.containers[*].image"):
        assert part in command
    assert "image that cannot be pulled" in said
    assert "--wait" in said

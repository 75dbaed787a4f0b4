"""What `helm install` says at its end."""

from tests.charts.fake_cluster import cluster
from tests.charts.rendering import CHART, NAMESPACE, helm

JOB = ("--set", "trainer.workload=Job")


def notes(*arguments, release="areal"):
    """As an installation into an empty cluster shows them."""
    with cluster() as address:
        server = ("--dry-run=server", "--disable-openapi-validation", "--kube-apiserver", address)
        place = ("--namespace", NAMESPACE, *server)
        done = helm("install", release, str(CHART), *place, *JOB, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("\nNOTES:\n")[2]


def test_notes_when_installed_then_they_say_how_to_see_what_keeps_pods_from_starting():
    said = notes()
    (command,) = [line for line in said.splitlines() if "custom-columns" in line]
    assert f"kubectl -n {NAMESPACE} get pods -l app.kubernetes.io/instance=areal" in command
    for part in ("initContainerStatuses", "containerStatuses", "spec.containers[*].image"):
        assert part in command
    assert "image that cannot be pulled" in said
    assert "--wait" in said

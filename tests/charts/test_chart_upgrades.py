"""What an upgrade finds in the cluster, and keeps or follows."""

from __future__ import annotations

import base64

import pytest
import yaml
from tests.charts.fake_cluster import cluster
from tests.charts.rendering import NAMESPACE, named, of_kind, template

AUTOSCALED = ("--set", "sglang.autoscaling.enabled=true,sglang.replicaCount=3")
KEDA = (*AUTOSCALED, "--set", "sglang.autoscaling.type=ScaledObject")


def deployment(replicas):
    meta = {"name": "sglang", "namespace": NAMESPACE, "annotations": {}}
    spec = {"replicas": replicas}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": meta, "spec": spec}


def secret(name, **values):
    data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
    meta = {"name": name, "namespace": NAMESPACE, "resourceVersion": "7"}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data}


def upgrade(address, *arguments):
    """The objects that helm renders against a cluster."""
    server = ("--dry-run=server", "--kube-apiserver", address)
    done = template("--is-upgrade", *server, *arguments)
    assert done.returncode == 0, done.stderr
    return tuple(each for each in yaml.safe_load_all(done.stdout) if each)


@pytest.mark.parametrize(("live", "wanted"), [(16, 16), (2, 2)])
def test_replicas_when_autoscaling_is_turned_on_by_an_upgrade_then_the_live_number_stays(
    live, wanted
):
    with cluster(deployment(live)) as address:
        for settings in (AUTOSCALED, KEDA):
            objects = upgrade(address, *settings)
            assert named(objects, "Deployment", "sglang")["spec"]["replicas"] == wanted
        (scaler,) = of_kind(objects, "ScaledObject")
    assert scaler["spec"]["fallback"] == {"failureThreshold": 3, "replicas": wanted}


def test_secret_when_the_cluster_has_it_then_its_values_stay():
    made = secret("areal-auth", token="t", **{"redis-password": "p", "nats-token": "n"})
    with cluster(made) as address:
        assert named(upgrade(address), "Secret", "areal-auth")["data"] == made["data"]

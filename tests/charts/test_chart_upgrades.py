"""What an upgrade finds in the cluster, and keeps or follows."""

from __future__ import annotations

import base64

import pytest
import yaml
from tests.charts.fake_cluster import cluster
from tests.charts.rendering import (
    NAMESPACE,
    named,
    objects_in,
    of_kind,
    pods,
    refusal,
    render,
    template,
)

from areal.security import FOLDER_VARIABLE, SECRET_VARIABLES

AUTOSCALED = ("--set", "sglang.autoscaling.enabled=true,sglang.replicaCount=3")
KEDA = (*AUTOSCALED, "--set", "sglang.autoscaling.type=ScaledObject")
OWN_SECRETS = ("--set", "auth.existingSecret=own-auth,tls.existingSecret=own-tls")


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
    return objects_in(done.stdout)


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


def checksums(objects):
    """Owner to the annotation that replaces its pods."""
    found = {}
    for each in objects:
        kind, spec = each["kind"], each.get("spec", {})
        if kind in ("Deployment", "StatefulSet"):
            templates = [spec["template"]]
        elif kind == "PyTorchJob":
            templates = [r["template"] for r in spec["pytorchReplicaSpecs"].values()]
        else:
            continue
        component = each["metadata"]["labels"]["app.kubernetes.io/component"]
        for one in templates:
            found[component] = one["metadata"].get("annotations", {}).get("checksum/secrets")
    return found


@pytest.mark.parametrize(
    "changed",
    [
        (secret("own-auth", token="two"), secret("own-tls", **{"tls.crt": "a"})),
        (secret("own-auth", token="one"), secret("own-tls", **{"tls.crt": "b"})),
    ],
    ids=["token", "certificate"],
)
def test_pods_when_a_secret_was_changed_then_an_upgrade_replaces_them(changed):
    first = (secret("own-auth", token="one"), secret("own-tls", **{"tls.crt": "a"}))
    with cluster(*first) as address:
        before, again = (upgrade(address, *OWN_SECRETS) for _ in range(2))
    with cluster(*changed) as address:
        after = upgrade(address, *OWN_SECRETS)
    assert checksums(before) == checksums(again), "nothing changed"
    components = {pod.component for pod in pods(before)} - {"prepare", "test"}
    assert checksums(before).keys() == components
    stay = {"trainer"} if changed[0]["data"] != first[0]["data"] else set()
    for component, digest in checksums(after).items():
        assert digest, component
        assert (digest == checksums(before)[component]) == (component in stay), component
    jobs = [{j["metadata"]["name"] for j in of_kind(o, "PyTorchJob")} for o in (before, after)]
    assert (jobs[0] == jobs[1]) == bool(stay), "operators roll no changed job"


@pytest.mark.parametrize("kind", ["PyTorchJob", "Job", "TrainJob"])
def test_trainer_when_it_starts_then_its_token_is_in_files_that_the_kubelet_renews(kind):
    objects = render("--set", f"trainer.workload={kind}")
    (spec,) = {yaml.safe_dump(p.spec) for p in pods(objects) if p.component == "trainer"}
    pod = yaml.safe_load(spec)
    container = pod["containers"][0]
    env = {each["name"]: each.get("value") for each in container["env"]}
    assert not env.keys() & SECRET_VARIABLES, "the environment never changes"
    (mount,) = (m for m in container["volumeMounts"] if m["mountPath"] == env[FOLDER_VARIABLE])
    assert mount["readOnly"]
    assert "subPath" not in mount, "the kubelet renews none"
    (volume,) = (v for v in pod["volumes"] if v["name"] == mount["name"])
    sources = [s["secret"] for s in volume["projected"]["sources"]]
    assert [s["items"][0]["path"] for s in sources] == ["token", "token-previous"]
    assert [s.get("optional", False) for s in sources] == [False, True]


def test_pods_when_the_generated_secret_appears_then_the_first_upgrade_replaces_none():
    made = secret("areal-auth", token="t", **{"redis-password": "p", "nats-token": "n"})
    with cluster() as address:
        installed = upgrade(address)
    with cluster(made) as address:
        upgraded = upgrade(address)
    for kind in ("Deployment", "StatefulSet", "PyTorchJob"):
        assert of_kind(installed, kind) == of_kind(upgraded, kind)


def test_pods_when_the_generated_token_was_rotated_by_hand_then_an_upgrade_replaces_them():
    with cluster() as address:
        installed = named(upgrade(address), "Secret", "areal-auth")
    installed["metadata"]["namespace"] = NAMESPACE
    with cluster(installed) as address:
        before = upgrade(address)
    rotated = {**installed, "data": {**installed["data"], "token": "cm90YXRlZA=="}}
    with cluster(rotated) as address:
        after = upgrade(address)
    assert set(checksums(before).values()) == {None}
    unchanged = {name for name, digest in checksums(after).items() if digest is None}
    assert unchanged == {"trainer"}, "it reads the token again"
    assert named(after, "Secret", "areal-auth")["data"]["token"] == "cm90YXRlZA=="
    rotated["metadata"] = {**named(after, "Secret", "areal-auth")["metadata"]}
    rotated["metadata"]["namespace"] = NAMESPACE
    with cluster(rotated) as address:
        again = upgrade(address)
    assert checksums(again) == checksums(after), "once is enough"


def test_secret_when_the_cluster_has_it_then_its_values_stay():
    made = secret("areal-auth", token="t", **{"redis-password": "p", "nats-token": "n"})
    with cluster(made) as address:
        assert named(upgrade(address), "Secret", "areal-auth")["data"] == made["data"]


@pytest.mark.parametrize(
    ("workload", "kind"),
    [
        ("PyTorchJob", "kubeflow.org/v1/PyTorchJob"),
        ("TrainJob", "trainer.kubeflow.org/v1alpha1/TrainJob"),
    ],
)
def test_trainer_when_the_cluster_has_no_operator_then_it_is_refused_with_the_way_out(
    workload, kind
):
    """Helm itself says `no matches for kind`, and shows no notes."""
    chosen = ("--set", f"trainer.workload={workload}")
    listed = ("--api-versions", "apps/v1/Deployment")  # as a cluster does, and helm alone does not
    assert f"trainer.workload is {workload}" in refusal(*chosen, *listed)
    assert "set trainer.workload=Job" in refusal(*chosen, *listed)
    assert render(*chosen, *listed, "--api-versions", kind)
    assert render(*listed, "--set", "trainer.workload=Job")
    assert render(*listed, *chosen, "--set", "trainer.enabled=false")
    assert render(*chosen), "without a cluster nothing is known"


def test_job_when_the_cluster_is_too_old_for_it_then_it_is_refused_with_the_way_out():
    """Helm itself says `unknown field "completionMode"`."""
    listed = ("--api-versions", "apps/v1/Deployment", "--set", "trainer.workload=Job")
    assert "set trainer.workload=PyTorchJob" in refusal(*listed, "--kube-version", "1.28.3")
    assert render(*listed, "--kube-version", "1.29.0")


def redis(size, storage_class="fast"):
    meta = {"name": "areal-redis", "namespace": NAMESPACE}
    storage = {"resources": {"requests": {"storage": size}}, "storageClassName": storage_class}
    spec = {"volumeClaimTemplates": [{"metadata": {"name": "data"}, "spec": storage}]}
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "metadata": meta, "spec": spec}


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("redis.size=50Gi", "redis.size 50Gi: the claim has 20Gi, and a StatefulSet's claims"),
        ("redis.size=50Gi", "delete statefulset areal-redis --cascade=orphan"),
        ("redis.storageClass=slow", "redis.storageClass slow: the claim has fast"),
    ],
)
def test_redis_when_its_claim_would_change_then_it_is_refused_with_the_way_out(setting, sentence):
    """The API server says only that updates of that field are forbidden."""
    with cluster(redis("20Gi")) as address:
        server = ("--dry-run=server", "--kube-apiserver", address, "--is-upgrade")
        assert sentence in refusal(*server, "--set", setting)
        assert upgrade(address)
        assert upgrade(address, "--set", f"{setting},redis.hostPath=/folder")


def test_generated_secret_when_rendered_then_it_says_who_cannot_use_it():
    """Every rendering without the cluster has another token: under Argo CD, every sync."""
    first, second = (render("--set", f"storage.size={n}Gi") for n in (1, 2))
    secrets = [named(objects, "Secret", "areal-auth") for objects in (first, second)]
    assert secrets[0]["data"]["token"] != secrets[1]["data"]["token"]
    for each in secrets:
        assert "needs auth.existingSecret" in each["metadata"]["annotations"]["areal.io/generated"]


def service(name, address):
    meta = {"name": name, "namespace": NAMESPACE, "resourceVersion": "7"}
    return {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": {"clusterIP": address}}


def cluster_address(objects, name):
    return named(objects, "Service", name)["spec"].get("clusterIP")


@pytest.mark.parametrize("component", ["rollout", "reward"])
def test_service_when_any_replica_serves_any_call_then_its_name_has_all_their_addresses(component):
    assert cluster_address(render(), f"areal-{component}") == "None"
    assert cluster_address(render(), "areal-buffer") is None


def test_service_when_clients_outside_use_it_too_then_theirs_has_an_address():
    objects = render("--set", "rollout.service.type=NodePort")
    assert cluster_address(objects, "areal-rollout") == "None"
    assert cluster_address(objects, "areal-rollout-external") is None


def test_service_when_an_older_release_gave_it_an_address_then_an_upgrade_keeps_it():
    with cluster(service("areal-rollout", "10.0.0.7"), service("areal-reward", "None")) as address:
        objects = upgrade(address)
    assert cluster_address(objects, "areal-rollout") is None
    assert cluster_address(objects, "areal-reward") == "None"

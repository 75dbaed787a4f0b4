"""Whatever names something else names something that is there."""

import re

import pytest
from tests.charts.policies import edges
from tests.charts.rendering import CI, experiment, named, of_kind, pods, render, render_ci

from areal.security import SECRET_VARIABLES

# Set by Kubernetes itself on the pods of an indexed Job.
SET_BY_KUBERNETES = {"batch.kubernetes.io/job-completion-index": "0"}
SECRET_KEYS = {"token", "redis-password", "nats-token"}


def selects(selector, pod):
    return selector.items() <= (pod.labels | SET_BY_KUBERNETES).items()


@pytest.mark.parametrize("values", CI)
def test_services_when_rendered_then_each_has_pods_with_its_ports(values):
    objects = render_ci(values)
    for service in of_kind(objects, "Service"):
        name, spec = service["metadata"]["name"], service["spec"]
        found = [pod for pod in pods(objects) if selects(spec["selector"], pod)]
        assert found, f"Service/{name} selects nothing"
        for pod in found:
            ports = [p for c in pod.spec["containers"] for p in c.get("ports", [])]
            known = {p["name"] for p in ports} | {p["containerPort"] for p in ports}
            for port in spec["ports"]:
                assert port["targetPort"] in known, f"Service/{name}: {port} is not in {pod.owner}"


@pytest.mark.parametrize("values", CI)
def test_selectors_when_rendered_then_they_select_their_own_pods_only(values):
    objects = render_ci(values)
    owners = of_kind(objects, "Deployment", "StatefulSet")
    for owner in owners:
        selector = owner["spec"]["selector"]["matchLabels"]
        found = {pod.owner for pod in pods(objects) if selects(selector, pod)}
        assert found == {f"{owner['kind']}/{owner['metadata']['name']}"}
    for budget in of_kind(objects, "PodDisruptionBudget"):
        selector = budget["spec"]["selector"]["matchLabels"]
        assert [pod for pod in pods(objects) if selects(selector, pod)]
    names = {owner["metadata"]["name"] for owner in owners}
    for scaler in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject"):
        assert scaler["spec"]["scaleTargetRef"]["name"] in names
        owner = named(objects, "Deployment", scaler["spec"]["scaleTargetRef"]["name"])
        low = scaler["spec"].get("minReplicas", scaler["spec"].get("minReplicaCount"))
        assert owner["spec"]["replicas"] >= low, "left out, an upgrade would make it 1"


@pytest.mark.parametrize("values", CI)
def test_pods_when_rendered_then_what_they_mount_and_read_exists(values):
    objects = render_ci(values)
    made = {(o["kind"], o["metadata"]["name"]): o for o in objects}
    # Secrets named in ci/ that someone else makes, with the keys in them.
    given = dict.fromkeys(("areal-own-auth", "areal-tls", "stores"), SECRET_KEYS)
    given["bucket"] = {"id", "secret"}
    for pod in pods(objects):
        volumes = {v["name"]: v for v in pod.spec.get("volumes", [])}
        if pod.kind == "StatefulSet":
            claims = named(objects, *pod.owner.split("/"))["spec"].get("volumeClaimTemplates", [])
            volumes |= {claim["metadata"]["name"]: claim for claim in claims}
        used = set()
        for container in pod.containers():
            where = f"{pod.owner} {container['name']}"
            for mount in container.get("volumeMounts", []):
                assert mount["name"] in volumes, f"{where}: {mount['name']}"
                used.add(mount["name"])
            for variable in container.get("env", []):
                if reference := variable.get("valueFrom", {}).get("secretKeyRef"):
                    secret = made.get(("Secret", reference["name"]))
                    assert secret or reference["name"] in given, where
                    keys = secret["data"].keys() if secret else given[reference["name"]]
                    assert reference["key"] in keys or reference.get("optional"), where
            names = [variable["name"] for variable in container.get("env", [])]
            assert len(names) == len(set(names)), f"{where}: a variable twice"
        assert used == set(volumes), f"{pod.owner}: volumes that no container mounts"
        for volume in volumes.values():
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in made, pod.owner
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert ("PersistentVolumeClaim", claim) in made, pod.owner
            if "secret" in volume:
                assert volume["secret"]["secretName"] in given, pod.owner
        if account := pod.spec.get("serviceAccountName"):
            assert ("ServiceAccount", account) in made, pod.owner


def test_secret_variables_when_rendered_then_the_processes_know_them():
    names = {
        variable["name"]
        for pod in pods(render())
        for container in pod.containers()
        for variable in container.get("env", [])
        if "secretKeyRef" in variable.get("valueFrom", {})
    }
    ours = {name for name in names if name.startswith("AREAL_")}
    assert ours == set(SECRET_VARIABLES)


@pytest.mark.parametrize("values", CI)
def test_endpoints_when_rendered_then_each_is_a_service_of_the_release(values):
    objects = render_ci(values)
    services = {
        service["metadata"]["name"]: [port["port"] for port in service["spec"]["ports"]]
        for service in of_kind(objects, "Service")
    }
    endpoints = experiment(objects)["endpoints"]
    found = [*endpoints.pop("inference"), *endpoints.values()]
    assert len(found) == (12 if values == "everything-values.yaml" else 10)
    for address in found:
        match = re.fullmatch(r"(?:\w+://)?(?:tests/)?([\w.-]+):(\d+)(?:/\d)?", address)
        assert match, address
        name, port = match[1], int(match[2])
        if name.endswith(".svc"):
            continue  # a store that somebody else runs
        assert port in services[name], address


def test_policies_when_rendered_then_they_are_the_picture():
    # docs/architecture.md: who calls whom.
    picture = {
        "gateway": {"rollout", "buffer", "weight-sync", "trainer"},
        "rollout": {"buffer", "reward", "weight-sync", "trainer", "sglang", "nats"},
        "reward": {"buffer"},
        "buffer": {"redis"},
        "trainer": {"buffer", "weight-sync", "trainer"},
        "weight-sync": {"redis", "nats", "sglang"},
        "sglang": {"weight-sync", "sglang"},
        "test": {"gateway"},
    }
    objects = render_ci("stream-values.yaml")  # with a sidecar beside each server
    allowed = {}
    for caller, called, _ in edges(objects):
        allowed.setdefault(caller, set()).add(called)
    assert allowed == picture
    ports = {}
    for pod in pods(objects):
        found = {p["containerPort"] for c in pod.spec["containers"] for p in c.get("ports", [])}
        ports.setdefault(pod.component, set()).update(found)
    for caller, called, port in edges(objects):
        assert port is None or port in ports[called], (caller, called, port)


def test_policies_when_stores_are_external_then_their_ports_are_open():
    objects = render_ci("external-redis-nats-values.yaml")
    policy = named(objects, "NetworkPolicy", "areal-external-redis")["spec"]
    assert policy["egress"] == [{"ports": [{"protocol": "TCP", "port": 6380}]}]
    (expression,) = policy["podSelector"]["matchExpressions"]
    assert expression["values"] == ["buffer", "weight-sync"]


def test_policies_when_nats_is_several_servers_then_the_port_of_each_is_open(tmp_path):
    file = tmp_path / "values.yaml"
    servers = "nats://nats-0.data:4333, nats://nats-1.data, tls://nats-2.data:4333"
    file.write_text(f"nats: {{enabled: false, externalUrl: '{servers}'}}\n")
    objects = render("--values", str(file))
    policy = named(objects, "NetworkPolicy", "areal-external-nats")["spec"]
    assert [each["port"] for each in policy["egress"][0]["ports"]] == [4333, 4222]
    assert experiment(objects)["endpoints"]["nats"] == servers


@pytest.mark.parametrize("workload", ["PyTorchJob", "TrainJob", "Job"])
def test_trainer_when_its_container_is_started_again_then_what_it_said_before_is_still_there(
    workload,
):
    """In a volume that lives as long as the pod: the container's own files are gone by then."""
    rendered = render("--set", f"trainer.workload={workload}")
    trainers = [pod for pod in pods(rendered) if pod.component == "trainer"]
    assert trainers
    for pod in trainers:
        [container] = pod.spec["containers"]
        [file] = [v["value"] for v in container["env"] if v["name"] == "AREAL_POD_VERDICT"]
        [mount] = [
            m["name"] for m in container["volumeMounts"] if file.startswith(f"{m['mountPath']}/")
        ]
        assert next(v for v in pod.spec["volumes"] if v["name"] == mount)["emptyDir"]

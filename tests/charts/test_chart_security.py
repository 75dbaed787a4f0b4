"""What every container of every release may and may not do."""

import pytest
from tests.charts.rendering import CI, named, of_kind, pods, render, render_ci

ROOT_CONTAINER = "own-folder"
# Their only user of the API server is weight-sync.
WITH_TOKEN = {"weight-sync"}


@pytest.mark.parametrize("values", CI)
def test_containers_when_rendered_then_they_are_confined(values):
    for pod in pods(render_ci(values)):
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"] is True, pod.owner
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}, pod.owner
        assert not any(pod.spec.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
        for container in pod.containers():
            where = f"{pod.owner} {container['name']}"
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"] is True, where
            assert own["allowPrivilegeEscalation"] is False, where
            assert own["capabilities"]["drop"] == ["ALL"], where
            assert "privileged" not in own, where
            if container["name"] != ROOT_CONTAINER:
                assert "runAsUser" not in own, where
                assert "add" not in own["capabilities"], where


def test_root_when_a_folder_of_the_node_is_used_then_one_init_container_may_chown_only():
    for objects, wanted in ((render(), 0), (render_ci("cpu-demo-values.yaml"), 2)):
        found = [c for p in pods(objects) for c in p.containers() if c["name"] == ROOT_CONTAINER]
        assert len(found) == wanted
        for container in found:
            assert container["securityContext"]["capabilities"]["add"] == ["CHOWN"]
            assert container["command"][0] == "chown"


@pytest.mark.parametrize("values", CI)
def test_api_tokens_when_unused_then_they_are_not_mounted(values):
    mounted = {p.component for p in pods(render_ci(values)) if token_is_mounted(p)}
    assert mounted == WITH_TOKEN


def token_is_mounted(pod):
    return pod.spec["automountServiceAccountToken"] is not False


def test_role_when_rendered_then_it_holds_what_discovery_needs_and_nothing_else():
    objects = render()
    rules = named(objects, "Role", "areal-weight-sync")["rules"]
    assert rules == [
        {
            "apiGroups": ["discovery.k8s.io"],
            "resources": ["endpointslices"],
            "verbs": ["get", "list", "watch"],
        },
        {"apiGroups": [""], "resources": ["pods/status"], "verbs": ["patch"]},
    ]
    assert not of_kind(objects, "ClusterRole", "ClusterRoleBinding")


@pytest.mark.parametrize("values", CI)
def test_containers_when_rendered_then_they_request_resources_and_bound_memory(values):
    for pod in pods(render_ci(values)):
        for container in pod.containers():
            resources, where = container["resources"], f"{pod.owner} {container['name']}"
            assert {"cpu", "memory"} <= resources["requests"].keys(), where
            assert "memory" in resources["limits"], where


@pytest.mark.parametrize("values", CI)
def test_servers_when_rendered_then_they_have_probes_and_time_to_drain(values):
    for pod in pods(render_ci(values)):
        if pod.kind not in ("Deployment", "StatefulSet"):
            continue
        for container in pod.spec["containers"]:
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                assert probe in container, f"{pod.owner}: {probe}"
        if pod.kind == "Deployment":
            container = pod.spec["containers"][0]
            if pod.component == "sandbox":  # its leases end with it: nothing to pause for
                pause = 0.0
                assert "lifecycle" not in container
            else:
                pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
            arguments = container["args"]
            drain = (
                float(arguments[arguments.index("--grace") + 1]) if "--grace" in arguments else 0
            )
            grace = pod.spec["terminationGracePeriodSeconds"]
            assert grace >= pause + drain + 2, f"{pod.owner}: killed while it drains"


def test_trainer_when_rendered_then_no_probe_hides_it_from_its_other_ranks():
    for pod in pods(render_ci("cpu-demo-values.yaml")):
        if pod.component == "trainer":
            (container,) = pod.spec["containers"]
            assert not [key for key in container if key.endswith("Probe")]


@pytest.mark.parametrize("values", CI)
def test_secrets_when_rendered_then_they_are_in_no_argument_and_no_config_map(values):
    objects = render_ci(values)
    for pod in pods(objects):
        for container in pod.containers():
            for variable in container.get("env", []):
                name = variable["name"]
                if "TOKEN" in name or "PASSWORD" in name:
                    assert "secretKeyRef" in variable["valueFrom"], f"{pod.owner}: {name}"
            words = " ".join([*container.get("command", []), *container.get("args", [])])
            assert "$(AREAL" not in words, pod.owner
            assert "--api-key" not in words, pod.owner


def test_policies_when_rendered_then_everything_is_denied_before_the_edges_allow():
    objects = render()
    deny = named(objects, "NetworkPolicy", "areal-deny-all")["spec"]
    assert deny["policyTypes"] == ["Ingress", "Egress"]
    assert not {"ingress", "egress"} & deny.keys()
    for pod in pods(objects):
        assert deny["podSelector"]["matchLabels"].items() <= pod.labels.items(), pod.owner
    assert not of_kind(render("--set", "networkPolicy.enabled=false"), "NetworkPolicy")

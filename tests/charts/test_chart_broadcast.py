"""`weight_sync.transport=distributed`: trainer and servers in one process group."""

from tests.charts.rendering import named, of_kind, pods, render, render_ci

DISTRIBUTED = ("--set", "overrides.weight_sync.transport=distributed")


def selected(selector, pod):
    wanted = selector.get("matchLabels", {}).items()
    return wanted <= pod.labels.items() and all(
        pod.labels.get(each["key"]) in each["values"] for each in selector["matchExpressions"]
    )


def test_policies_when_weights_are_broadcast_then_trainer_and_servers_reach_each_other():
    """gloo and NCCL choose their ports, and every member connects to every other one."""
    for objects in (render(*DISTRIBUTED), render_ci("gpu-values.yaml", *DISTRIBUTED)):
        spec = named(objects, "NetworkPolicy", "areal-broadcast")["spec"]
        assert spec["policyTypes"] == ["Ingress"]
        (rule,) = spec["ingress"]
        assert rule.keys() == {"from"}  # any port
        (peer,) = rule["from"]
        for selector in (spec["podSelector"], peer["podSelector"]):
            members = {pod.component for pod in pods(objects) if selected(selector, pod)}
            assert members == {"trainer", "sglang"}


def test_policies_when_weights_are_not_broadcast_then_those_ports_stay_closed():
    for objects in (render(), render_ci("stream-values.yaml")):
        names = {each["metadata"]["name"] for each in of_kind(objects, "NetworkPolicy")}
        assert names
        assert "areal-broadcast" not in names


def test_servers_when_weights_are_broadcast_then_they_mount_the_volume_for_what_is_stored():
    (pod,) = (pod for pod in pods(render(*DISTRIBUTED)) if pod.component == "sglang")
    assert "data" in {volume["name"] for volume in pod.spec["volumes"]}


def test_nccl_when_weights_are_broadcast_then_set_alike_for_trainer_and_servers():
    """SGLang turns both off in its own processes; a group whose members differ may hang."""
    for objects in (render(*DISTRIBUTED), render_ci("gpu-values.yaml", *DISTRIBUTED)):
        found = set()
        for pod in pods(objects):
            if pod.component in ("trainer", "sglang"):
                found.add(pod.component)
                main, *_ = pod.spec["containers"]
                env = {each["name"]: each.get("value") for each in main["env"]}
                assert (env["NCCL_CUMEM_ENABLE"], env["NCCL_NVLS_ENABLE"]) == ("0", "0")
        assert found == {"trainer", "sglang"}

"""Where version 0 comes from, and how long everything waits for it."""

import pytest
import yaml
from tests.charts.fake_cluster import cluster
from tests.charts.rendering import NAMESPACE, named, objects_in, of_kind, pods, render, template
from tests.charts.test_chart_notes import notes


def job(*arguments):
    """The Job, and its container."""
    (found,) = (o for o in of_kind(render(*arguments), "Job") if "prepare" in o["metadata"]["name"])
    return found, found["spec"]["template"]["spec"]["containers"][0]


def set_source(source):
    return ("--set", f"prepare.source={source}")


def source_policies(*arguments):
    names = [each["metadata"]["name"] for each in of_kind(render(*arguments), "NetworkPolicy")]
    return [name for name in names if "prepare-to-source" in name]


@pytest.mark.parametrize(
    "address", ["hf://Qwen/Qwen3-0.6B@v1.0", "s3://models/qwen/3", "gs://models/qwen3", "az://m/q"]
)
def test_model_when_it_is_outside_the_cluster_then_prepare_fetches_it_and_may_go_out(address):
    source = set_source(address)
    found, container = job(*source)
    assert f"--source={address}" in container["args"]
    assert "source" not in {v["name"] for v in found["spec"]["template"]["spec"]["volumes"]}
    policy = named(render(*source), "NetworkPolicy", "areal-prepare-to-source")["spec"]
    assert policy["egress"] == [{}]
    assert policy["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "prepare"
    assert not source_policies(), "a recipe runs there then"


@pytest.mark.parametrize(
    ("source", "folder"),
    [("pvc://models/qwen/3", "/source/qwen/3"), ("pvc://models", "/source/")],
)
def test_model_when_it_is_on_another_claim_then_it_is_mounted_for_reading(source, folder):
    found, container = job(*set_source(source))
    assert f"--source={folder}" in container["args"]
    (volume,) = (v for v in found["spec"]["template"]["spec"]["volumes"] if v["name"] == "source")
    assert volume["persistentVolumeClaim"] == {"claimName": "models", "readOnly": True}
    mount = {"name": "source", "mountPath": "/source", "readOnly": True}
    assert mount in container["volumeMounts"]
    assert not source_policies(*set_source(source))


def test_prepare_when_its_pod_is_described_then_the_description_is_its_own(tmp_path):
    token = {"valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    own = {
        "extraEnv": [{"name": "HF_TOKEN"} | token, {"name": "HTTPS_PROXY", "value": "http://p:1"}],
        "affinity": {"nodeAffinity": {}},
        "nodeSelector": {"disk": "fast"},
        "tolerations": [{"key": "download", "operator": "Exists"}],
        "serviceAccountName": "reader",
        "podAnnotations": {"sidecar.istio.io/inject": "false"},
    }
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump({"prepare": own, "trainer": {"nodeSelector": {"gpu": "yes"}}}))
    found, container = job("--values", str(file))
    template = found["spec"]["template"]
    assert all(each in container["env"] for each in own["extraEnv"])
    for key in ("affinity", "nodeSelector", "tolerations", "serviceAccountName"):
        assert template["spec"][key] == own[key]
    assert template["metadata"]["annotations"].items() >= own["podAnnotations"].items()


def test_prepare_when_nothing_is_said_of_its_nodes_then_they_are_the_trainers():
    found, _ = job("--set", "trainer.nodeSelector.gpu=yes")
    assert found["spec"]["template"]["spec"]["nodeSelector"] == {"gpu": "yes"}


@pytest.mark.parametrize(("condition", "suffix"), [("Failed", "-1"), ("Complete", "")])
def test_prepare_when_its_job_has_failed_then_the_next_revision_makes_another(condition, suffix):
    """Helm leaves a Job of the same name as it is, failed or not."""
    name = job()[0]["metadata"]["name"]
    assert job()[0]["metadata"]["name"] == name, "an upgrade with the same values makes no Job"
    live = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": NAMESPACE},
        "status": {"conditions": [{"type": condition, "status": "True"}]},
    }
    with cluster(live) as address:
        server = ("--dry-run=server", "--kube-apiserver", address, "--is-upgrade")
        done = template(*server)
    assert done.returncode == 0, done.stderr
    found = [o for o in objects_in(done.stdout) if o["kind"] == "Job"]
    [again] = [o["metadata"]["name"] for o in found if "prepare" in o["metadata"]["name"]]
    # `helm template` counts every release as its first.
    assert again == name + suffix


def test_prepare_when_it_fails_then_its_pod_and_log_stay():
    found, _ = job()
    assert found["spec"]["template"]["spec"]["restartPolicy"] == "Never"


def test_deadline_when_it_is_set_then_everything_waits_as_long():
    settings = ("--set", "prepare.deadlineSeconds=7200,sglang.gpus=1")
    found, container = job(*settings)
    assert "--deadline=7200" in container["args"]
    assert found["spec"]["activeDeadlineSeconds"] > 7200, "it says what it lacks before it is ended"
    objects, waiting = render(*settings), set()
    for pod in pods(objects):
        for each in pod.spec.get("initContainers", []):
            if each["name"] == "wait-for-model":
                waiting.add(pod.component)
                assert {"name": "DEADLINE", "value": "7200"} in each["env"]
    assert waiting >= {"trainer", "weight-sync", "sglang"}
    for each in of_kind(objects, "Deployment"):
        component = each["metadata"]["labels"]["app.kubernetes.io/component"]
        if component in waiting:
            probe = each["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
            start = probe["periodSeconds"] * probe["failureThreshold"]
            assert each["spec"]["progressDeadlineSeconds"] > 7200 + start, component


def test_notes_when_a_person_must_copy_the_model_then_they_say_how():
    plain = ("--set", "recipe=def main(argv): pass", "--set", "overrides.model.path=models/tiny")
    said = notes(*plain)
    (command,) = [line for line in said.splitlines() if " cp " in line]
    assert command.strip().startswith("kubectl -n tests cp -c prepare FOLDER ")
    assert command.endswith(":/data/models/tiny")
    assert "prepare.source=hf://org/name" in said
    for others in ((*plain, *set_source("hf://a/b")), ()):
        assert " cp " not in notes(*others)

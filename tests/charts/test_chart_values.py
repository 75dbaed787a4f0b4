"""Mistakes in values are refused with a sentence that says what to do."""

import json

import pytest
import yaml
from tests.charts.rendering import CHART, refusal, render, render_ci, template

MISTAKES = [
    ("sglang.replicaCount=many", "sglang.replicaCount: Invalid type. Expected: [integer,null]"),
    ("sglang.replicas=2", "Additional property replicas is not allowed"),
    ("trainer.workload=MPIJob", 'must be one of the following: "PyTorchJob", "TrainJob", "Job"'),
    ("weightSync.replicaCount=3", "weightSync.replicaCount must be one of the following: 1, 2"),
    ("trainer.replicaCount=0", "trainer.replicaCount: Must be greater than or equal to 1"),
    ("storage.hostPath=relative", "storage.hostPath: Does not match pattern"),
    ("rollout.service.nodePort=70000", "Must be less than or equal to 65535"),
    ("tracing.endpoint=collector:4317", "tracing.endpoint: Does not match pattern"),
    ("nosuch.key=1", "Additional property nosuch is not allowed"),
    (
        "trainer.replicaCount=2,storage.accessMode=ReadWriteOnce",
        "several trainer pods share one checkpoint folder, so the volume must be ReadWriteMany",
    ),
    ("storage.hostPath=/d,storage.existingClaim=c", "are both set: choose one"),
    ("redis.enabled=false", "redis.externalUrl is empty: expected e.g. redis://host:6379/0"),
    ("nats.enabled=false,nats.externalUrl=nats://a b", "nats.externalUrl: Does not match"),
    ("prepare.source=s3://bucket", "prepare.source: Does not match pattern"),
    ("prepare.source=hf://name", "prepare.source: Does not match pattern"),
    ("image.references.sglang=x", "Additional property sglang is not allowed"),
    ("nats.externalUrl=nats://n:4222", "set nats.enabled=false to use the external one"),
    (
        "redis.enabled=false,redis.externalUrl=redis://:secret@r:6379",
        "readable in a ConfigMap: put it into the Secret",
    ),
    ("buffer.enabled=false", "set overrides.endpoints.buffer to the address of the one to use"),
    ("sglang.enabled=false", "set overrides.endpoints.inference to the address"),
    (
        "reward.autoscaling.enabled=true,reward.autoscaling.minReplicas=9",
        "minReplicas 9 is above maxReplicas 8",
    ),
    (
        "weightSync.enabled=false,overrides.weight_sync.transport=stream,"
        "overrides.endpoints.weight_sync=w:1",
        "set overrides.endpoints.weight_store to http://host:port",
    ),
    ("config=- a list", "config: not a YAML mapping"),
    ("config=seed: 1", "model.path of the experiment is empty"),
    (
        "overrides.model.path=models/${model.name}",
        "set overrides.model.path to the folder itself",
    ),
    ("overrides.seed=abc", "overrides.seed abc: expected an integer"),
    ("overrides.seed=2.5", "overrides.seed 2.5: expected an integer"),
    ("overrides.gconfig.temperature=hot", "overrides.gconfig.temperature hot: expected a number"),
    ("overrides.reward.workers=0", "overrides.reward.workers 0: expected an integer, 1 or more"),
    (
        "overrides.actor.eps_clip=1.5",
        "overrides.actor.eps_clip 1.5: expected a number, above 0 and at most 1",
    ),
    ("overrides.actor.offload=maybe", "overrides.actor.offload maybe: expected true or false"),
    (
        "overrides.weight_sync.transport=disc",
        "overrides.weight_sync.transport disc: expected one of disk, stream, distributed",
    ),
    ("overrides.endpoints.inference=a:1", "overrides.endpoints.inference a:1: expected a list"),
    ("overrides.model=m", "overrides.model m: expected a mapping"),
    ("overrides.model.path={a}", "overrides.model.path [a]: expected text"),
    ("image.repository=https://reg.io/areal", "image.repository: Does not match pattern"),
    ("image.repository=reg.io/areal:v1", "image.repository: Does not match pattern"),
    ("image.tag=v1:2", "image.tag: Does not match pattern"),
    ("image.references.trainer=reg.io/a b", "image.references.trainer: Does not match pattern"),
    ("trainer.image=https://reg.io/a", "trainer.image: Does not match pattern"),
    ("sglang.image.repository=a/B", "sglang.image.repository: Does not match pattern"),
    ("sglang.resources.limits.memory=5XB", "sglang.resources.limits.memory: Does not match"),
    ("prepare.resources.requests.cpu=-1", "prepare.resources.requests.cpu: Must be greater"),
    ("tls.existingSecret=Bad_Name", "tls.existingSecret: Does not match pattern"),
    ("storage.existingClaim=my claim", "storage.existingClaim: Does not match pattern"),
    ("gateway.service.nodePort=80", "nodePort: Must be greater than or equal to 1024"),
    ("gateway.ingress.hosts[0]=a_b.example", "gateway.ingress.hosts.0: Does not match pattern"),
    ("gateway.httpRoute.hostnames[0]=a_b", "gateway.httpRoute.hostnames.0: Does not match"),
    ("reward.pdb.minAvailable=1,reward.pdb.maxUnavailable=1", "reward.pdb has minAvailable and"),
    (
        "common.podSpec.containers=x",
        "common.podSpec.containers would replace those of the chart: use common.container",
    ),
    ("redis.podSpec.volumes[0].name=x", "redis.podSpec.volumes would replace those of the chart"),
]


@pytest.mark.parametrize(("setting", "sentence"), MISTAKES, ids=[m[0] for m in MISTAKES])
def test_values_when_they_cannot_work_then_a_sentence_says_why(setting, sentence):
    assert sentence in refusal("--set", setting)


def test_release_when_its_name_begins_with_a_digit_then_a_sentence_says_why():
    done = template(release="1abc")
    assert done.returncode != 0
    assert "release name 1abc: it begins with a digit, and names of Services may not" in done.stderr
    objects = render("--set", "fullnameOverride=abc", release="1abc")
    assert "abc-buffer" in {each["metadata"]["name"] for each in objects}


def test_values_when_they_are_written_in_other_ways_then_accepted():
    """As `--set` and YAML write numbers, references to other keys, and names with a port."""
    overrides = [
        *("seed=7", "actor.optimizer.lr=1e-4", "gconfig.temperature=0.5", "experiment_name=5"),
        *("total_train_steps=1000000", "trial_name=t${seed}", "checkpoint.freq_steps=1_000"),
        *("actor.offload=true", "reward.workers=${seed}", "actor.optimizer.weight_decay=0"),
        *("endpoints.inference={http://gpu-1:30000}", "actor.loss_constants.tau=1"),
    ]
    settings = [f"overrides.{each}" for each in overrides]
    settings += [
        *("image.tag=v1.2-rc", "trainer.image=localhost:5000/team/trainer:v1"),
        *("sglang.resources.limits.memory=1.5Gi", "sglang.resources.limits.cpu=500m"),
        *("redis.resources.limits.memory=1e9", "gateway.ingress.hosts[0]=*.example.com"),
        *("reward.pdb.minAvailable=1", "gateway.service.nodePort=30080"),
        "gateway.ingress.hosts[1].host=a.example.com",
    ]
    assert render(*(part for each in settings for part in ("--set", each)))
    for repository in ("reg.io:5000/a/b_c", "reg.io", "localhost:5000", "a__b/c--d"):
        assert render("--set", f"image.repository={repository}")


def test_values_when_a_component_is_elsewhere_then_its_endpoint_is_used():
    objects = render(
        *("--set", "sglang.enabled=false"),
        *("--set", "overrides.endpoints.inference={http://gpu-1:30000}"),
    )
    assert not [o for o in objects if o["metadata"]["name"] == "sglang"]


def documented(node):
    """Dotted keys of a mapping."""
    for key, value in node.items():
        yield key
        if isinstance(value, dict):
            yield from (f"{key}.{sub}" for sub in documented(value))


def _depth(line):
    return len(line) - len(line.lstrip())


def test_values_when_listed_then_each_has_a_comment_and_a_schema():
    text = (CHART / "values.yaml").read_text()
    lines = text.splitlines()
    keys = [n for n, line in enumerate(lines) if line.strip() and not line.strip().startswith("#")]
    # A mapping whose keys are all explained, or a bound explained with its pair, needs none.
    without = ("requests:", "limits:", "maxReplicas:", "target:")
    for number in keys:
        line = lines[number].strip()
        if line.endswith(":") and not line.startswith(("resources", "requests")):
            continue  # a block; its keys are explained
        if line.startswith(without):
            continue
        depth = len(lines[number]) - len(line)
        block = (
            max(n for n in range(number) if lines[n].strip() and _depth(lines[n]) < depth)
            if depth
            else number
        )
        if depth and lines[block - 1].strip().startswith("# --"):
            continue  # its block is explained as a whole
        assert lines[number - 1].strip().startswith("# "), f"line {number + 1}: {line}"
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(yaml.safe_load(text)) == set(schema["properties"])


def test_components_when_compared_then_they_have_the_same_keys_in_the_same_order():
    order = [
        *("enabled", "replicaCount", "image", "resources", "nodeSelector", "tolerations"),
        *("affinity", "podAnnotations", "serviceAccountName", "autoscaling", "pdb", "extraEnv"),
    ]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in ("gateway", "rollout", "reward", "buffer", "weightSync", "sglang", "trainer"):
        keys = [key for key in values[name] if key in order]
        assert keys == [key for key in order if key in keys], name
        assert list(values[name])[: len(keys)] == keys, f"{name}: its own keys come last"


def test_secret_when_given_then_none_is_generated():
    kinds = [o["kind"] for o in render_ci("secured-values.yaml")]
    assert "Secret" not in kinds


def test_secret_when_stores_are_external_then_no_password_is_made_up_for_them():
    objects = render(
        *("--set", "redis.enabled=false,redis.externalUrl=redis://r:6379/0"),
        *("--set", "nats.enabled=false,nats.externalUrl=nats://n:4222"),
    )
    data = next(o["data"] for o in objects if o["kind"] == "Secret")
    assert data["token"]
    assert data["redis-password"] == data["nats-token"] == ""

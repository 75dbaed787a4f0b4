"""`make e2e-kubernetes ARGS=--scarce`: one GPU, memory for one trainer, an HPA that comes later.

The GPU is a number in the node's status: the scheduler counts it, nothing computes on it. The
autoscaler is the cluster's own; what it reads comes from `metrics_api.py` in a pod.
"""

from __future__ import annotations

import base64
import json
import re
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from tests.kubernetes import metrics_api
from tests.kubernetes.cluster import Failed, Json, condition, is_ready, program, wait
from tests.kubernetes.stages import Run

GPU = "nvidia.com/gpu"
TRAINER_GI, REST_GI = 6, 4
"""Memory that the trainer asks for; what the quota leaves to everything else."""
SERVERS, MOST = 3, 5
METRIC = "areal_rollout_recommended_inference_servers"
API = "v1beta1.external.metrics.k8s.io"
ADAPTER, READER = "metrics-api", "areal-e2e-metrics-reader"


class Scarce(Run):
    """A release that has hardly enough."""

    autoscaling = False

    def values(self) -> list[str]:
        """One trainer pod with the GPU; three servers that take one request at a time."""
        sets = [
            "trainer.replicaCount=1,trainer.gpusPerPod=1,trainer.resources.requests.cpu=300m",
            f"trainer.resources.requests.memory={TRAINER_GI}Gi",
            f"trainer.resources.limits.memory={TRAINER_GI}Gi",
            # So few that generation is what a step waits for: more servers are wanted.
            f"sglang.replicaCount={SERVERS},sglang.maxRunningRequests=1",
        ]
        if self.autoscaling:
            sets.append(f"sglang.autoscaling.enabled=true,sglang.autoscaling.maxReplicas={MOST}")
        return [*super().values(), "--set", ",".join(sets)]

    # -- stages ---------------------------------------------------------------------------------

    def make_scarce(self) -> str:
        """A GPU on the node; a quota with memory for one trainer and not for two."""
        if self.cluster.kubectl("get", "apiservice", API, "--ignore-not-found"):
            raise Failed(f"the cluster has an APIService {API} of its own")
        self.advertise("1")
        hard = {f"requests.{GPU}": "1", "requests.memory": f"{TRAINER_GI + REST_GI}Gi"}
        self.create({"kind": "ResourceQuota", "apiVersion": "v1", "spec": {"hard": hard}}, "scarce")
        return (
            f"1 {GPU} and a quota of {TRAINER_GI + REST_GI} GiB; the trainer requests "
            f"{TRAINER_GI} GiB"
        )

    def trainer_first(self) -> str:
        """The worst order: the trainer's pod holds its share before the Job prepare is there."""
        rendered = self.cluster.helm("template", "areal", *self.values(), "--dry-run=server")
        (job,) = (o for o in yaml.safe_load_all(rendered) if o and o["kind"] == "PyTorchJob")
        mine = {"release-name": "areal", "release-namespace": self.cluster.namespace}
        job["metadata"]["annotations"] = {f"meta.helm.sh/{key}": mine[key] for key in mine}
        self.create(job, job["metadata"]["name"])

        def scheduled() -> bool:
            return any(condition(pod, "PodScheduled") for pod in self.cluster.pods("trainer"))

        wait("the trainer's pod on a node", scheduled, 120.0)
        return "it has the GPU and its memory, and waits for the model"

    def trains(self) -> str:
        """Steps; and there is no room for a second trainer."""
        step = self.wait_for_step(2)
        (quota,) = self.cluster.get("quota", "scarce")
        hard, used = (
            {k: _gib(v) for k, v in quota["status"][which].items()} for which in ("hard", "used")
        )
        if (
            hard["requests.memory"] - used["requests.memory"] >= TRAINER_GI
            or not used[f"requests.{GPU}"]
        ):
            raise Failed(f"not scarce: {used} of {hard}")
        return (
            f"step {step}; the pods use {used['requests.memory']:.1f} of the quota's "
            f"{hard['requests.memory']:.0f} GiB, and the GPU"
        )

    def autoscale(self) -> str:
        """An HPA that comes by upgrade, and has no metric yet, changes nothing."""
        before = self.service_pods()
        self.autoscaling = True
        self.cluster.helm("upgrade", "areal", *self.arguments())

        def blind() -> Json | None:
            conditions = self.hpa()["status"].get("conditions")  # null before its first look
            found = {c["type"]: c for c in conditions or []}
            active: Json | None = found.get("ScalingActive")
            return active if active and active["status"] == "False" else None

        reason = wait("a first look of the HPA", blind, 120.0)["reason"]
        if self.replicas() != SERVERS or self.service_pods() != before:
            raise Failed(f"{self.replicas()} servers, or new pods; {SERVERS} were there before")
        return f"the {SERVERS} servers kept running in the same pods; the HPA reported {reason}"

    def follow(self) -> str:
        """With a metric to read, the HPA goes where the rollout worker's recommendation is."""
        began = time.monotonic()
        self.serve_metrics()
        wait("more servers by the HPA", lambda: self.replicas() > SERVERS, 600.0, pause=3.0)
        scaled = time.monotonic() - began
        replicas, said = self.replicas(), self.metrics()
        if replicas > max(SERVERS, min(MOST, said[METRIC])):
            raise Failed(f"{replicas} servers, {said[METRIC]} are recommended, {MOST} the most")
        self.servers(replicas)
        self.wait_for_step(self.step() + 2)
        busy = {k: said[f"areal_rollout_{k}_busy_fraction"] for k in ("generation", "training")}
        return (
            f"{SERVERS} to {replicas} servers in {scaled:.0f} s ({said[METRIC]:.0f} recommended, "
            f"at most {MOST}; generation busy {busy['generation']:.2f}, "
            f"training {busy['training']:.2f}); training continued"
        )

    def uninstall(self) -> str:
        """What the stages made beside the release goes first."""
        self.restore()
        for kind in ("pod", "service", "secret"):
            self.cluster.kubectl("delete", kind, ADAPTER)
        self.cluster.kubectl("delete", "quota", "scarce")
        return super().uninstall()

    # -- helpers --------------------------------------------------------------------------------

    def create(self, thing: Json, name: str) -> None:
        """`kubectl create`, of what an old API server's validation may not know."""
        thing.setdefault("metadata", {})["name"] = name
        command = [program("kubectl"), "-n", self.cluster.namespace, "create", "--validate=false"]
        done = subprocess.run(
            [*command, "-f", "-"], input=json.dumps(thing), capture_output=True, text=True
        )
        if done.returncode:
            raise Failed(f"{thing['kind']} {name}: {done.stderr.strip()}")

    def advertise(self, gpus: str | None) -> None:
        """So many GPUs on the first node; None: as it was."""
        (name, *_) = (node["metadata"]["name"] for node in self.cluster.get("nodes"))
        where = [f"/status/{kind}/nvidia.com~1gpu" for kind in ("capacity", "allocatable")]
        patch: list[Json] = [
            {"op": "remove", "path": path}
            if gpus is None
            else {"op": "add", "path": path, "value": gpus}
            for path in where
        ]
        arguments = ("--subresource=status", "--type=json", "-p", json.dumps(patch))
        self.cluster.kubectl("patch", "node", name, *arguments)

    def hpa(self) -> Json:
        """In the newest version that the cluster has: older ones show no conditions."""
        known = self.cluster.kubectl("api-versions").split()
        version = "v2" if "autoscaling/v2" in known else "v2beta2"
        where = f"namespaces/{self.cluster.namespace}/horizontalpodautoscalers/sglang"
        found: Json = json.loads(
            self.cluster.kubectl("get", "--raw", f"/apis/autoscaling/{version}/{where}")
        )
        return found

    def replicas(self) -> int:
        """Servers that the Deployment asks for."""
        return int(self.cluster.get("deploy", "sglang")[0]["spec"]["replicas"])

    def metrics(self) -> dict[str, float]:
        """What the rollout worker says, metrics without labels alone."""
        bearer = {"Authorization": f"Bearer {self.cluster.secret('token')}"}
        with self.cluster.forward("areal-rollout", 9100) as address:
            request = urllib.request.Request(f"http://{address}/metrics", headers=bearer)
            with urllib.request.urlopen(request, timeout=30) as reply:
                text = reply.read().decode()
        return {m[1]: float(m[2]) for m in re.finditer(r"^(\w+) (\S+)$", text, re.MULTILINE)}

    def serve_metrics(self) -> None:
        """A pod that answers external.metrics.k8s.io."""
        host = f"{ADAPTER}.{self.cluster.namespace}.svc"
        certificate, key = self.authority.certificate(ADAPTER, f"DNS:{host}")
        files = {"tls.crt": certificate, "tls.key": key, "api.py": Path(metrics_api.__file__)}
        self.cluster.kubectl(
            *("create", "secret", "generic", ADAPTER),
            *(f"--from-file={name}={path}" for name, path in files.items()),
        )
        *things, api = _adapter(self.cluster.namespace, self.settings.tag, self.authority.ca)
        for thing in things:
            self.create(thing, thing["metadata"]["name"])
        # The API server keeps the connection of its first look: none from before the Service works.
        wait("the adapter", lambda: is_ready(self.cluster.get("pod", ADAPTER)[0]), 120.0)
        self.create(api, API)

        def served() -> bool:
            return bool(condition(self.cluster.get("apiservice", API)[0], "Available"))

        wait("the external metrics API", served, 120.0)

    def restore(self) -> None:
        """The cluster as it was."""
        with suppress(subprocess.SubprocessError):
            # Before its pod: an API that does not answer keeps a namespace from going.
            self.cluster.kubectl("delete", "apiservice", API, "--ignore-not-found")
        with suppress(subprocess.SubprocessError):
            kinds = f"clusterrole/{READER}", f"clusterrolebinding/{READER}"
            self.cluster.kubectl("delete", *kinds, "--ignore-not-found")
        with suppress(subprocess.SubprocessError):
            self.advertise(None)


def _gib(quantity: str) -> float:
    match = re.fullmatch(r"(\d+)(Gi|Mi|Ki)?", quantity)
    assert match, quantity
    return int(match[1]) * {"Gi": 1.0, "Mi": 2**-10, "Ki": 2**-20, None: 2**-30}[match[2]]


def _adapter(namespace: str, tag: str, ca: Path) -> list[Json]:
    labels = {"app": ADAPTER}
    container: dict[str, Any] = {
        "name": "api",
        "image": f"areal/control:{tag}",
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "/etc/api/api.py", "/etc/api/tls.crt", "/etc/api/tls.key"],
        "env": [
            {"name": "AREAL_TOKEN"}
            | {"valueFrom": {"secretKeyRef": {"name": "areal-auth", "key": "token"}}}
        ],
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "volumeMounts": [{"name": "api", "mountPath": "/etc/api"}],
        "readinessProbe": {"tcpSocket": {"port": metrics_api.PORT}, "periodSeconds": 1},
    }
    spec = {
        "containers": [container],
        "volumes": [{"name": "api", "secret": {"secretName": ADAPTER}}],
    }
    group, version = metrics_api.VERSION.split("/")
    api = {
        "group": group,
        "version": version,
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "service": {"name": ADAPTER, "namespace": namespace},
        "caBundle": base64.b64encode(ca.read_bytes()).decode(),
    }
    ports = [{"port": 443, "targetPort": metrics_api.PORT}]
    rbac = "rbac.authorization.k8s.io"
    rules = [{"apiGroups": [group], "resources": ["*"], "verbs": ["get", "list"]}]
    autoscaler = {"kind": "ServiceAccount", "name": "horizontal-pod-autoscaler"}
    return [
        {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": {"name": READER}}
        | {"rules": rules},
        {"apiVersion": f"{rbac}/v1", "kind": "ClusterRoleBinding", "metadata": {"name": READER}}
        | {"roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": READER}}
        | {"subjects": [autoscaler | {"namespace": "kube-system"}]},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": ADAPTER, "labels": labels}}
        | {"spec": spec},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": ADAPTER}}
        | {"spec": {"selector": labels, "ports": ports}},
        {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService"}
        | {"metadata": {"name": API}, "spec": api},
    ]

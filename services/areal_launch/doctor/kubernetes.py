"""`areal doctor --on kubernetes`: what the rendered chart needs, against what the cluster has."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import yaml

from areal.config.transports import in_object_store
from areal.errors import ArealError, NotFound
from areal_launch.clusters.kubernetes import Release
from areal_launch.clusters.kubernetes_api import KubernetesApi
from areal_launch.doctor.admission import (
    Planned,
    outside_ranges,
    pod_security_problems,
    pod_uses,
    quantity,
    quota_problems,
    range_entries,
    shared_class,
)
from areal_launch.doctor.findings import Finding, examine, missing, note, ok, unknown
from areal_launch.doctor.preflight import weights_problem

OLDEST = (1, 20)
_TRAINER_KINDS = ("kubeflow.org/v1/PyTorchJob", "trainer.kubeflow.org/v1alpha1/TrainJob")
_CRD_SOURCES = {
    "kubeflow.org": "install the Kubeflow training operator, or set trainer.workload=Job",
    "trainer.kubeflow.org": "install Kubeflow Trainer 2, or set trainer.workload=Job",
    "monitoring.coreos.com": "install the Prometheus operator, or set metrics.* to false",
    "keda.sh": "install KEDA, or set autoscaling.type=HPA",
}
# What a chart creates: resource to its API group.
_CREATED = {
    "deployments": "apps",
    "statefulsets": "apps",
    "services": "",
    "secrets": "",
    "configmaps": "",
    "roles": "rbac.authorization.k8s.io",
}
_DEFAULT = "storageclass.kubernetes.io/is-default-class"
_COUNTED = ("cpu", "memory")
_RDMA = re.compile(r"rdma|infiniband|/hca|efa|/ib", re.IGNORECASE)


class ClusterDoctor:
    """Compares one release, not installed yet, with one cluster."""

    def __init__(self, release: Release) -> None:
        self._release = release
        self._config = release.config

    @property
    def _api(self) -> KubernetesApi:
        """Connects when it is first asked: a cluster that is away is a finding."""
        return self._release.api

    def examine(self) -> list[Finding]:
        """Returns all findings; ends early without a cluster or a chart that renders."""
        first: list[Finding] = []
        for name, check in {"cluster": self._cluster, "chart": self._chart}.items():
            first += examine({name: check})
            if first[-1].verdict != "ok":
                return first
        return first + examine(
            {
                "API versions": self._kinds,
                "permissions": self._permissions,
                "storage class": self._storage,
                "bucket": self._bucket,
                "images": self._images,
                "GPUs": self._gpus,
                "network": self._network,
                "secrets": self._secrets,
                "quota": self._quota,
                "limit range": self._limits,
                "pod security": self._pod_security,
            }
        )

    def _cluster(self) -> Finding:
        version = self._api.version()
        match = re.match(r"v(\d+)\.(\d+)", version)
        if match is None or (int(match[1]), int(match[2])) < OLDEST:
            return missing(version, f"use Kubernetes {OLDEST[0]}.{OLDEST[1]} or newer")
        return ok(version)

    def _chart(self) -> Finding:
        return ok(f"{self._config.stack.kubernetes.chart} renders {len(self._objects)} objects")

    @cached_property
    def _objects(self) -> list[dict[str, Any]]:
        """Renders the chart for this cluster's version and APIs.

        By helm's own look at the cluster; where that refuses, for what is missing is not installed,
        with what the cluster serves added to the kinds that helm takes for granted.
        """
        command = ["template", *self._release.chart_arguments()]
        try:
            text = self._release.helm(*command, "--validate", "--is-upgrade")
        except NotFound:
            raise
        except ArealError:
            # Both forms: a chart may ask for a group's version or for a kind in it. The trainer's
            # kinds too, without which it does not render: here that is one finding of many.
            served = [*self._served, *_TRAINER_KINDS]
            served += [f"{group}/{kind}" for group, kinds in self._served.items() for kind in kinds]
            apis = [part for each in served for part in ("--api-versions", each)]
            text = self._release.helm(*command, "--kube-version", self._api.version(), *apis)
        return [each for each in yaml.safe_load_all(text) if each]

    def _kinds(self) -> Finding:
        wanted = {(each["apiVersion"], each["kind"]) for each in self._objects}
        absent = sorted((v, k) for v, k in wanted if k not in self._served.get(v, ()))
        if not absent:
            return ok(f"all {len(wanted)} kinds are known to the cluster")
        fixes = {
            _CRD_SOURCES.get(version.partition("/")[0], "use a newer cluster, or other values")
            for version, _ in absent
        }
        names = ", ".join(f"{version} {kind}" for version, kind in absent)
        return missing(f"not served: {names}", "; ".join(sorted(fixes)))

    @cached_property
    def _served(self) -> dict[str, set[str]]:
        return self._api.served()

    def _permissions(self) -> Finding:
        refused = [
            kind for kind, group in _CREATED.items() if not self._api.may_create(group, kind)
        ]
        if refused:
            fix = "get a role that may create them in the namespace"
            return missing(f"not allowed to create {', '.join(refused)}", fix)
        return ok(f"may create {', '.join(_CREATED)}")

    def _bucket(self) -> Finding:
        """Checks the bucket from here: pods may have another identity, but not another bucket."""
        path = self._release.config.weight_sync.path
        if not in_object_store(path):
            return ok("none: versions are on a volume or in weight-sync's store")
        if why := weights_problem(self._release.config):
            fix = "create it, or grant access; if only the pods have access, check their logs"
            return note(why, f"{fix} for transport_fell_back")
        return ok(f"{path} can be written, listed and deleted in from here")

    def _storage(self) -> Finding:
        claims = [each["spec"] for each in self._objects if each["kind"] == "PersistentVolumeClaim"]
        for each in self._objects:
            claims += [c["spec"] for c in each.get("spec", {}).get("volumeClaimTemplates") or []]
        if not claims:
            return ok("no claims: host paths or existing claims")
        classes = self._api.get(self._api.storage.list_storage_class)["items"]
        names = {each["metadata"]["name"]: each["metadata"].get("annotations") for each in classes}
        default = [name for name, notes in names.items() if (notes or {}).get(_DEFAULT) == "true"]
        wanted = {claim.get("storageClassName") or "" for claim in claims}
        absent = sorted(each for each in wanted if each and each not in names)
        fix = "set storage.storageClass and redis.storageClass, or storage.hostPath on one node"
        if absent:
            return missing(f"no storage class {', '.join(absent)}", fix)
        if "" in wanted and not default:
            return missing("no default storage class", fix)
        modes = sorted({mode for claim in claims for mode in claim["accessModes"]})
        used = ", ".join(sorted((wanted - {""}) | set(default[:1] if "" in wanted else [])))
        if "ReadWriteMany" in modes:
            shared = {each["metadata"]["name"]: shared_class(each) for each in classes}
            many = {c.get("storageClassName") or default[0] for c in claims if _many(c)}
            fix = (
                "set storage.storageClass to a class on NFS, CephFS, EFS or Filestore, or "
                "storage.existingClaim"
            )
            if single := sorted(name for name in many if shared[name] is False):
                one = "; for one trainer pod, storage.accessMode=ReadWriteOnce keeps pods together"
                said = f"{', '.join(single)}: one node can mount a volume, and ReadWriteMany is set"
                return missing(said, fix + one)
            if any(shared[name] is None for name in many):
                return note(f"{used}; whether it supports ReadWriteMany is unknown", fix)
        return ok(f"{used} ({', '.join(modes)})")

    def _images(self) -> Finding:
        containers = [each for pod in self._pods() for each in _containers(pod.spec)]
        wanted = {container["image"] for container in containers}
        images = [each for node in self._nodes for each in node["status"].get("images") or []]
        present = {name for each in images for name in each["names"]}
        absent = sorted(image for image in wanted if not ({image, f"docker.io/{image}"} & present))
        if not absent:
            return ok(f"all {len(wanted)} are on a node")
        fix = "push them to image.repository (with image.pullSecrets), or load them onto the nodes"
        if any(container.get("imagePullPolicy") == "Never" for container in containers):
            return missing(f"on no node: {', '.join(absent)}", fix)
        return note(f"will be pulled at the start: {', '.join(absent)}", fix)

    def _gpus(self) -> Finding:
        wanted: Counter[str] = Counter()
        for pod in self._pods():
            for container in _containers(pod.spec):
                limits = (container.get("resources") or {}).get("limits") or {}
                wanted.update({k: pod.replicas * int(n) for k, n in limits.items() if "/" in k})
        if not wanted:
            return ok("none requested")
        found = {
            name: sum(int(node["status"]["allocatable"].get(name, 0)) for node in self._nodes)
            for name in wanted
        }
        said = ", ".join(
            f"{name}: {wanted[name]} requested, {found[name]} on the nodes" for name in wanted
        )
        if any(found[name] < wanted[name] for name in wanted):
            fix = "add GPU nodes and a device plugin, set gpuResource, or use a smaller allocation"
            return missing(said, fix)
        return ok(said)

    def _network(self) -> Finding:
        if not self._config.stack.gpus_per_node:
            return ok("ranks on CPUs use TCP")
        devices = [each for node in self._nodes for each in node["status"]["allocatable"].items()]
        fast = sorted({k for k, amount in devices if _RDMA.search(k) and str(amount) != "0"})
        if fast:
            return ok(f"for NCCL: {', '.join(fast)} (to use it, request it in trainer.resources)")
        ranks = self._config.allocation_mode
        return note(
            f"no RDMA resource on any node, so NCCL uses TCP between nodes ({ranks})",
            "install the vendor's RDMA or EFA device plugin, or use one node for all ranks",
        )

    def _secrets(self) -> Finding:
        own = {each["metadata"]["name"] for each in self._objects if each["kind"] == "Secret"}
        wanted: dict[str, set[str]] = {}
        for name, key in _references([pod.spec for pod in self._pods()]):
            if name not in own:
                wanted.setdefault(name, set()).update({key} - {""})
        absent = []
        for name, keys in sorted(wanted.items()):
            try:
                read = self._api.core.read_namespaced_secret
                content = self._api.get(read, name, self._api.namespace)
                absent += [f"{name}.{key}" for key in sorted(keys - set(content.get("data") or {}))]
            except NotFound:
                absent.append(name)
        if absent:
            fix = "kubectl create secret generic NAME --from-file=KEY=FILE"
            return missing(f"missing: {', '.join(absent)}", fix)
        return ok(", ".join(sorted(wanted)) or "the chart creates its own")

    def _quota(self) -> Finding:
        quotas = self._of_namespace("resource_quota")
        if not quotas:
            return self._room()
        pods, problems = list(self._pods()), []
        for quota in quotas:
            problems += quota_problems(quota, pods, self._objects, self._ranges)
        if problems:
            fix = "get a larger quota, or set smaller resources in the components' values"
            return missing(_some(problems), fix)
        return ok(f"{len(quotas)} quotas have room")

    def _limits(self) -> Finding:
        whole = range_entries(self._of_namespace("limit_range"), "Pod")
        if problems := outside_ranges(self._pods(), self._ranges, whole):
            return missing(_some(problems), "set these values, or get another LimitRange")
        return ok("none" if not [*self._ranges, *whole] else "all containers are within it")

    def _pod_security(self) -> Finding:
        try:
            space = self._api.get(self._api.core.read_namespace, self._api.namespace)
        except NotFound:
            return ok("the namespace will be created without a level")
        except ArealError as error:
            return unknown(str(error), "ask for the label pod-security.kubernetes.io/enforce")
        level, problems = pod_security_problems(space, self._pods())
        if problems:
            fix = "change these values, or the label of the namespace"
            return missing(f"the namespace enforces {level}: {_some(problems)}", fix)
        return ok(f"the namespace enforces {level}")

    @cached_property
    def _ranges(self) -> list[dict[str, Any]]:
        return range_entries(self._of_namespace("limit_range"), "Container")

    def _of_namespace(self, kind: str) -> list[dict[str, Any]]:
        listing = getattr(self._api.core, f"list_namespaced_{kind}")
        return list(self._api.get(listing, self._api.namespace)["items"])

    def _room(self) -> Finding:
        wanted = self._requests()
        free = {
            name: sum(quantity(node["status"]["allocatable"][name]) for node in self._nodes)
            for name in wanted
        }
        try:
            pods = self._api.get(self._api.core.list_pod_for_all_namespaces)["items"]
        except ArealError:
            pods = []  # not ours to see: what others use is not known then
        for pod in pods:
            if pod["spec"].get("nodeName") and pod["status"]["phase"] in ("Pending", "Running"):
                for name, amount in _asked(pod["spec"]).items():
                    free[name] -= amount
        said = (
            f"no quota; the pods request {wanted['cpu']:g} CPUs of {free['cpu']:g} free, and "
            f"{wanted['memory'] / 2**30:.1f} GiB of {free['memory'] / 2**30:.1f} free"
        )
        if any(wanted[name] > free[name] for name in wanted):
            return missing(said, "add nodes, or set smaller resources.requests")
        return ok(said)

    def _requests(self) -> dict[str, float]:
        asked = [(pod.replicas, _asked(pod.spec)) for pod in self._pods()]
        return {name: sum(n * each[name] for n, each in asked) for name in _COUNTED}

    @cached_property
    def _nodes(self) -> list[dict[str, Any]]:
        return list(self._api.get(self._api.core.list_node)["items"])

    def _pods(self) -> Iterator[Planned]:
        """Yields all pods of the chart except those of its tests."""
        for each in self._objects:
            spec = each.get("spec") or {}
            replicas = [spec, *(spec.get("pytorchReplicaSpecs") or {}).values()]
            if each["kind"] == "TrainingRuntime":
                jobs = spec["template"]["spec"]["replicatedJobs"]
                count = spec["mlPolicy"]["numNodes"]
                replicas = [{**job["template"]["spec"], "completions": count} for job in jobs]
            for replica in replicas:
                template = replica.get("template") or {}
                pod = template.get("spec") or {}
                if "containers" in pod:
                    number = replica.get("replicas", replica.get("completions", 1))
                    component = template["metadata"]["labels"]["app.kubernetes.io/component"]
                    yield Planned(component, int(1 if number is None else number), pod)


def _many(claim: dict[str, Any]) -> bool:
    return "ReadWriteMany" in claim["accessModes"]


def _some(problems: list[str]) -> str:
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    return "; ".join(problems[:3]) + more


def _containers(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [*(spec.get("initContainers") or []), *spec["containers"]]


def _asked(spec: dict[str, Any]) -> dict[str, float]:
    """Returns the CPUs and bytes that a pod requests."""
    uses = pod_uses(spec)
    return {name: uses[f"requests.{name}"] for name in _COUNTED}


def _references(specs: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Yields (Secret, key) that pods refer to; key "" for a whole Secret."""
    for spec in specs:
        for pull in spec.get("imagePullSecrets") or []:
            yield pull["name"], ""
        for volume in spec.get("volumes") or []:
            sources = (volume.get("projected") or {}).get("sources") or []
            for secret in (volume.get("secret"), *(each.get("secret") for each in sources)):
                if secret and not secret.get("optional"):
                    name = secret.get("secretName") or secret["name"]
                    yield from (
                        (name, item["key"]) for item in secret.get("items") or [{"key": ""}]
                    )
        for container in _containers(spec):
            for variable in container.get("env") or []:
                reference = (variable.get("valueFrom") or {}).get("secretKeyRef")
                if reference and not reference.get("optional"):
                    yield reference["name"], reference["key"]

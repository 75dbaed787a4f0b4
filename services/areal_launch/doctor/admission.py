"""What a namespace admits: quotas, limit ranges and Pod Security, against planned pods.

Kubernetes refuses a pod when its owner creates it, after the install: the release is there, and a
workload has no pods. So the answers here name the chart's value to set.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal.errors import ArealError

Json = dict[str, Any]
Amounts = defaultdict[str, float]
"""Resources to numbers: CPUs, bytes, objects."""
COMPUTE = ("cpu", "memory", "ephemeral-storage")
_KEYS = {"weight-sync": "weightSync"}
_LEVEL = "pod-security.kubernetes.io/enforce"
_SAFE_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
    *("persistentVolumeClaim", "projected", "secret"),
}
# What the level baseline lets a container add.
_BASELINE_CAPABILITIES = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
    *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
}


@dataclass(frozen=True)
class Planned:
    """Equal pods that the chart will make."""

    component: str
    replicas: int
    spec: Json

    @property
    def key(self) -> str:
        """The component's key in the chart's values."""
        return _KEYS.get(self.component, self.component)

    def containers(self) -> Iterator[tuple[Json, str]]:
        """Yields each container, with the value that sets its resources."""
        for each in self.spec.get("initContainers") or []:
            yield each, "common.initResources"
        for index, each in enumerate(self.spec["containers"]):
            name = "sglang.sidecarResources" if each["name"] == "sidecar" else ""
            if self.component == "test":
                name = "common.initResources"
            elif index and not name:
                name = f"the resources of {self.key}.sidecars"
            yield each, name or f"{self.key}.resources"


def quantity(text: str) -> float:
    """Returns a Kubernetes quantity (500m, 2, 4Gi) as a number."""
    import kubernetes.utils

    library: Any = kubernetes.utils  # has no types
    try:
        return float(library.parse_quantity(text))
    except ValueError:
        raise ArealError(f"quantity {text!r}: expected e.g. 500m, 2 or 4Gi") from None


def resources_of(container: Json, ranges: Sequence[Json] = ()) -> dict[str, dict[str, float]]:
    """Returns `requests` and `limits` as the API completes them.

    Args:
        container: As rendered.
        ranges: `limits` entries of LimitRanges, type Container, whose defaults fill gaps.
    """
    own = container.get("resources") or {}
    limits = {k: str(v) for k, v in (own.get("limits") or {}).items()}
    requests = limits | {k: str(v) for k, v in (own.get("requests") or {}).items()}
    for each in ranges:
        limits = {**(each.get("default") or {}), **limits}
        requests = {**(each.get("defaultRequest") or each.get("default") or {}), **requests}
    return {
        "requests": {name: quantity(text) for name, text in requests.items()},
        "limits": {name: quantity(text) for name, text in limits.items()},
    }


def pod_uses(spec: Json, ranges: Sequence[Json] = ()) -> Amounts:
    """Returns what a quota counts of a pod: `requests.cpu`, `limits.memory` and so on.

    Init containers run one after the other, before the others: the largest counts.
    """

    def add(to: Amounts, container: Json) -> Amounts:
        for kind, each in resources_of(container, ranges).items():
            for name, amount in each.items():
                to[f"{kind}.{name}"] += amount
        return to

    uses: Amounts = defaultdict(float)
    alone = []
    for each in spec["containers"]:
        add(uses, each)
    for each in spec.get("initContainers") or []:
        if each.get("restartPolicy") == "Always":
            add(uses, each)
        else:
            alone.append(add(defaultdict(float), each))
    for one in alone:
        for name, amount in one.items():
            uses[name] = max(uses[name], amount)
    return uses


def range_entries(limit_ranges: Iterable[Json], kind: str) -> list[Json]:
    """Returns the entries of LimitRange objects for a kind: Container, Pod."""
    entries = [each for one in limit_ranges for each in one["spec"].get("limits") or []]
    return [each for each in entries if each.get("type") == kind]


def outside_ranges(
    pods: Iterable[Planned], ranges: Sequence[Json], whole: Sequence[Json] = ()
) -> list[str]:
    """Returns a sentence for each container, and each pod, whose resources a LimitRange refuses.

    Args:
        pods: Planned pods.
        ranges: The entries for containers.
        whole: The entries for pods, which are about the sums of their containers.
    """
    found = []
    for pod in pods:
        for container, value in pod.containers():
            has = resources_of(container, ranges)
            for entry in ranges:
                for part, name, why in _outside(has, entry):
                    named = f"{pod.component}/{container['name']}"
                    found.append(f"{named} has {why}: set {value}.{part}.{name}")
        sums: dict[str, dict[str, float]] = {"requests": {}, "limits": {}}
        for key, amount in pod_uses(pod.spec, ranges).items():
            part, _, name = key.partition(".")
            sums[part][name] = amount
        for entry in whole:
            for part, name, why in _outside(sums, entry):
                found.append(
                    f"{pod.component}'s pod has {why}: set {pod.key}.resources.{part}.{name}"
                )
    return list(dict.fromkeys(found))


def _outside(has: Mapping[str, Mapping[str, float]], entry: Json) -> Iterator[tuple[str, str, str]]:
    """Yields what to change (requests or limits, of what) and what an entry refuses."""
    for name, text in (entry.get("max") or {}).items():
        limit = has["limits"].get(name)
        if limit is None or limit > quantity(str(text)):
            said = "no limit" if limit is None else f"a limit of {_amount(limit, name)}"
            yield "limits", name, f"{said} of {name}, and at most {text} is allowed"
    for name, text in (entry.get("min") or {}).items():
        request = has["requests"].get(name)
        if request is None or request < quantity(str(text)):
            said = "no request" if request is None else f"a request of {_amount(request, name)}"
            yield "requests", name, f"{said} of {name}, and at least {text} is expected"
    for name, text in (entry.get("maxLimitRequestRatio") or {}).items():
        limit, request = has["limits"].get(name), has["requests"].get(name)
        most = quantity(str(text))
        if limit and request and limit / request <= most:
            continue
        said = (
            f"a limit of {_amount(limit or 0, name)} for a request of {_amount(request or 0, name)}"
        )
        why = f"{said} of {name}, and at most {most:g} times the request is allowed"
        yield "requests" if limit else "limits", name, why


def _amount(number: float, kind: str) -> str:
    """Writes a quantity as people do: 500m CPUs, 3.5Gi."""
    if "memory" in kind or "storage" in kind.replace("storageclass.storage", ""):
        for unit in ("Ti", "Gi", "Mi", "Ki"):
            size = 1024.0 ** (1 + ("Ki", "Mi", "Gi", "Ti").index(unit))
            if abs(number) >= size:
                return f"{number / size:.4g}{unit}"
    if "cpu" in kind and 0 < abs(number) < 1:
        return f"{number * 1000:.4g}m"
    return f"{number:.6g}"


def quota_problems(
    quota: Json, pods: Sequence[Planned], objects: Iterable[Json], ranges: Sequence[Json]
) -> list[str]:
    """Returns a sentence for each kind of which a ResourceQuota has too little.

    Args:
        quota: The object; one with scopes counts only some pods and is not read.
        pods: Planned pods, which the quota counts.
        objects: Of the chart.
        ranges: See `resources_of`.
    """
    spec, status = quota.get("spec") or {}, quota.get("status") or {}
    if spec.get("scopes") or spec.get("scopeSelector"):
        return []
    hard, used = status.get("hard") or spec.get("hard") or {}, status.get("used") or {}
    wanted = _counted(pods, objects, ranges)
    name, found = quota["metadata"]["name"], []
    for key, text in hard.items():
        kind = f"requests.{key}" if key in COMPUTE else key
        if kind.startswith(("requests.", "limits.")) and kind != "requests.storage":
            found += [f"{name}: {why}" for why in _undeclared(kind, pods, ranges)]
        left = quantity(str(text)) - quantity(str(used.get(key, "0")))
        if wanted[kind] > left:
            found.append(
                f"{name}: {_amount(wanted[kind], key)} {key} needed, {_amount(left, key)} left"
            )
    return list(dict.fromkeys(found))


def _counted(pods: Sequence[Planned], objects: Iterable[Json], ranges: Sequence[Json]) -> Amounts:
    wanted: Amounts = defaultdict(float)
    for pod in pods:
        for name, amount in pod_uses(pod.spec, ranges).items():
            wanted[name] += pod.replicas * amount
        wanted["pods"] += pod.replicas
        wanted["count/pods"] += pod.replicas
    for each in objects:
        plural, group = _plural(each["kind"]), each["apiVersion"].rpartition("/")[0]
        wanted[f"count/{plural}.{group}" if group else f"count/{plural}"] += 1
        if not group:
            wanted[plural] += 1
        claims = [each] if each["kind"] == "PersistentVolumeClaim" else []
        templates = (each.get("spec") or {}).get("volumeClaimTemplates") or []
        for claim in [*claims, *templates]:
            spec = claim["spec"]
            size = quantity(str(spec["resources"]["requests"]["storage"]))
            owner = f"{spec.get('storageClassName')}.storageclass.storage.k8s.io/"
            number = 0 if claim in claims else 1  # a claim of the chart is counted above
            for prefix in ("", owner):
                wanted[f"{prefix}requests.storage"] += size
                wanted[f"{prefix}persistentvolumeclaims"] += number if not prefix else 1
    return wanted


def _undeclared(kind: str, pods: Sequence[Planned], ranges: Sequence[Json]) -> Iterator[str]:
    """A quota on CPUs or memory refuses a pod with a container that does not say how much."""
    part, _, resource = kind.partition(".")
    if resource not in COMPUTE:
        return
    for pod in pods:
        for container, value in pod.containers():
            if resource not in resources_of(container, ranges)[part]:
                yield (
                    f"it limits {kind}, and {pod.component}/{container['name']} has none: set "
                    f"{value}.{part}.{resource}, or a LimitRange with a default"
                )


def _plural(kind: str) -> str:
    name = kind.lower()
    if name.endswith("y"):
        return f"{name[:-1]}ies"
    return f"{name}es" if name.endswith("s") else f"{name}s"


def pod_security_problems(namespace: Json, pods: Iterable[Planned]) -> tuple[str, list[str]]:
    """Returns the level that a namespace enforces, and what of the pods it refuses."""
    level = (namespace["metadata"].get("labels") or {}).get(_LEVEL, "privileged")
    if level not in ("baseline", "restricted"):
        return level, []
    found: list[str] = []
    for pod in pods:
        found += [f"{pod.component}: {why}" for why in _refused(pod, level == "restricted")]
    return level, list(dict.fromkeys(found))


def _refused(pod: Planned, restricted: bool) -> Iterator[str]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.spec.get(field):
            yield f"{field} (set {pod.key}.{field} and common.{field} to false)"
    for volume in pod.spec.get("volumes") or []:
        kind = next(iter(set(volume) - {"name"}), "emptyDir")
        if kind == "hostPath" or (restricted and kind not in _SAFE_VOLUMES):
            where = f"{pod.key}.extraVolumes"
            if volume["name"] == "data":
                where = "redis.hostPath" if pod.component == "redis" else "storage.hostPath"
            yield f"a volume of kind {kind} (without {where})"
    for container, _ in pod.containers():
        own = container.get("securityContext") or {}
        context = {**(pod.spec.get("securityContext") or {}), **own}
        for why in _open(context, restricted):
            yield (
                f"{container['name']} {why} (see {pod.key}.securityContext and "
                "common.podSecurityContext)"
            )


def _open(context: Json, restricted: bool) -> Iterator[str]:
    """Says what a container's security context allows that the level does not."""
    capabilities = context.get("capabilities") or {}
    profile = (context.get("seccompProfile") or {}).get("type", "")
    allowed = {"NET_BIND_SERVICE"} if restricted else _BASELINE_CAPABILITIES
    added = set(capabilities.get("add") or []) - allowed
    confined = profile != "Unconfined" and context.get("procMount", "Default") == "Default"
    said = {
        "is privileged": bool(context.get("privileged")),
        f"adds {', '.join(sorted(added))}": bool(added),
        "is unconfined": not confined,
    }
    if restricted:
        gains = context.get("allowPrivilegeEscalation") is not False
        root = context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0
        said |= {
            "keeps capabilities": "ALL" not in (capabilities.get("drop") or []),
            "may gain privileges": gains,
            "may run as root": root,
            "has no seccompProfile": confined and profile not in ("RuntimeDefault", "Localhost"),
        }
    yield from (what for what, true in said.items() if true)


# Provisioners by a part of their name: volumes for many nodes at once, and for one node.
_SHARED = re.compile(
    r"nfs|cephfs|efs\.csi|filestore|file\.csi\.azure|azure-file|lustre|fsx|gpfs|glusterfs|"
    r"juicefs|longhorn|weka|beegfs|portworx|fuse|mountpoint-s3|isilon|vast|netapp|trident",
    re.IGNORECASE,
)
_SINGLE = re.compile(
    r"ebs\.csi|aws-ebs|pd\.csi|gce-pd|disk\.csi\.azure|azure-disk|cinder|rbd|local-path|"
    r"no-provisioner|topolvm|openebs.*(local|lvm|zfs)|hostpath|vsphere-volume",
    re.IGNORECASE,
)


def shared_class(storage_class: Mapping[str, Any]) -> bool | None:
    """Whether volumes of a storage class can be ReadWriteMany; None: its name does not say."""
    provisioner = str(storage_class.get("provisioner", ""))
    if _SINGLE.search(provisioner):
        return False
    return True if _SHARED.search(provisioner) else None

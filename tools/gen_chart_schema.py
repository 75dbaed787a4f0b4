"""Writes what the chart checks values against: `make manifests`.

- charts/areal/values.schema.json: tools/chart_schema.json, and in each component the fields of a
  pod (`POD`) with the names that other charts have for them (`OTHER_NAMES`).
- charts/areal/files/keys.json: the keys of an experiment, from the configuration's dataclasses.
  templates/validate.yaml refuses others in `config` and `overrides`.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from areal.config.experiment import GRPOConfig, known_keys

ROOT = Path(__file__).resolve().parent.parent
BASE = ROOT / "tools" / "chart_schema.json"
SCHEMA = ROOT / "charts" / "areal" / "values.schema.json"
KEYS = ROOT / "charts" / "areal" / "files" / "keys.json"
COMPONENTS = (
    *("gateway", "rollout", "reward", "buffer", "weightSync", "sglang", "trainer"),
    *("sandbox", "prepare", "redis", "nats"),
)

Json = dict[str, Any]
TEXT: Json = {"type": "string"}
FLAG: Json = {"type": "boolean"}
OBJECT: Json = {"type": "object"}
TEXTS: Json = {"$ref": "#/$defs/strings"}
NAMED: Json = {
    "type": "array",
    "items": {"type": "object", "required": ["name"], "properties": {"name": TEXT}},
}
OBJECTS: Json = {"type": "array", "items": OBJECT}
POD: dict[str, Json] = {
    "labels": TEXTS,
    "annotations": TEXTS,
    "podLabels": TEXTS,
    "podAnnotations": TEXTS,
    "nodeSelector": TEXTS,
    "tolerations": OBJECTS,
    "affinity": OBJECT,
    "topologySpreadConstraints": OBJECTS,
    "priorityClassName": TEXT,
    "schedulerName": TEXT,
    "runtimeClassName": TEXT,
    "hostNetwork": FLAG,
    "hostIPC": FLAG,
    "dnsPolicy": TEXT,
    "dnsConfig": OBJECT,
    "hostAliases": OBJECTS,
    "podSecurityContext": OBJECT,
    "securityContext": OBJECT,
    "extraVolumes": NAMED,
    "extraVolumeMounts": NAMED,
    "shmSize": {"type": "string", "pattern": "^([0-9.]+([KMGTPE]i?)?)?$"},
    "extraEnv": {"$ref": "#/$defs/env"},
    "envFrom": OBJECTS,
    "initContainers": NAMED,
    "sidecars": NAMED,
    "resourceClaims": NAMED,
    "imagePullSecrets": {
        "type": "array",
        "items": {"type": ["string", "object"], "properties": {"name": TEXT}},
    },
    "podSpec": OBJECT,
    "container": OBJECT,
}
OTHER_NAMES = {
    "sidecarContainers": "sidecars",
    "extraContainers": "sidecars",
    "extraEnvVars": "extraEnv",
    "env": "extraEnv",
    "extraEnvFrom": "envFrom",
    "volumes": "extraVolumes",
    "volumeMounts": "extraVolumeMounts",
    "extraInitContainers": "initContainers",
    "containerSecurityContext": "securityContext",
}
ACCOUNT: Json = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"create": FLAG, "name": TEXT, "annotations": TEXTS},
}
FAMILIES: Json = {
    "ipFamilyPolicy": {"enum": ["", "SingleStack", "PreferDualStack", "RequireDualStack"]},
    "ipFamilies": {"type": "array", "items": {"enum": ["IPv4", "IPv6"]}},
}
SERVICE: Json = {
    "type": "object",
    "additionalProperties": False,
    "properties": {"annotations": TEXTS, **FAMILIES},
}


def schema() -> Json:
    """The schema of the chart's values."""
    whole: Json = json.loads(BASE.read_text())
    pod = POD | {other: POD[name] for other, name in OTHER_NAMES.items()}
    properties = whole["properties"]
    for name in COMPONENTS:
        own = properties[name]["properties"]
        own |= copy.deepcopy({key: each for key, each in pod.items() if key not in own})
        own |= {"serviceAccountName": TEXT, "serviceAccount": copy.deepcopy(ACCOUNT)}
        if name != "prepare":  # a Job without a Service
            own.setdefault("service", copy.deepcopy(SERVICE))
    properties["common"]["properties"] |= copy.deepcopy(pod) | {"service": SERVICE}
    return whole


def keys() -> Json:
    """The keys of an experiment: sections, in which others are mistakes, and values."""
    every = known_keys(GRPOConfig)
    sections = sorted({key.rpartition(".")[0] for key in every} - {""})
    return {"sections": sections, "values": sorted(set(every) - set(sections))}


def main() -> None:
    SCHEMA.write_text(json.dumps(schema(), indent=2) + "\n")
    KEYS.write_text(json.dumps(keys(), indent=1) + "\n")


if __name__ == "__main__":
    main()

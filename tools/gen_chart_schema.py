"""Writes what the chart checks values against: `make manifests`.

- charts/areal/values.schema.json: tools/chart_schema.json, and in each component the fields of a
  pod (`POD`) with the names that other charts have for them (`OTHER_NAMES`), and what Kubernetes
  accepts as a name, an image and so on (`PATTERNS`).
- charts/areal/files/keys.json: the keys of an experiment, and what is known of their values, from
  the configuration's dataclasses. templates/validate.yaml refuses others in `config` and
  `overrides`.
"""

from __future__ import annotations

import copy
import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

from areal.config.experiment import GRPOConfig

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


LABEL = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
NAME = rf"{LABEL}(\.{LABEL})*"  # of most objects (RFC 1123)
REGISTRY = r"[a-zA-Z0-9]([-a-zA-Z0-9.]*[a-zA-Z0-9])?(:[0-9]+)?"
FOLDER = "[a-z0-9]+((\\.|_|__|-+)[a-z0-9]+)*"
REPOSITORY = f"({REGISTRY}|{FOLDER})(/{FOLDER})*"
TAG = "[A-Za-z0-9_][-A-Za-z0-9_.]{0,127}"
DIGEST = "sha256:[0-9a-f]{64}"
IMAGE = f"{REPOSITORY}(:{TAG})?(@{DIGEST})?"
PATTERNS = {
    **dict.fromkeys(("existingSecret", "existingClaim", "storageClass"), NAME),
    **dict.fromkeys(("serviceAccountName", "runtimeClassName", "priorityClassName"), NAME),
    **dict.fromkeys(("className", "ingressClassName"), NAME),
    **dict.fromkeys(("hostname", "hosts", "hostnames", "host"), rf"(\*\.)?{NAME}"),
    **dict.fromkeys(("registry", "repository"), REPOSITORY),
    "tag": f"{TAG}(@{DIGEST})?",
    "digest": DIGEST,
    **dict.fromkeys(("image", "references"), IMAGE),
}
"""What the text of a key must look like, wherever the key is: text of its own, or of its items."""
QUANTITY: Json = {
    "type": ["string", "number", "null"],
    "minimum": 0,
    "pattern": r"^\+?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$",
}


def add_patterns(node: Any, key: str = "") -> None:
    """Adds `PATTERNS` to the texts in a schema; empty text stays allowed, as it means none."""
    if not isinstance(node, dict):
        return
    if key in ("requests", "limits"):
        node["additionalProperties"] = QUANTITY
    if "string" in node.get("type", ()) and key in PATTERNS:
        node.setdefault("pattern", f"^({PATTERNS[key]})?$")
    for name, each in node.get("properties", {}).items():
        add_patterns(each, key if key == "references" else name)
    for name, each in node.get("$defs", {}).items():
        add_patterns(each, name)
    add_patterns(node.get("items"), key)


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
    whole = json.loads(json.dumps(whole))  # in which no two keys share a schema
    add_patterns(whole)
    return whole


KINDS = {
    bool: ("flag", "true or false"),
    int: ("integer", "an integer"),
    float: ("number", "a number"),
    str: ("text", "text"),
    list: ("list", "a list"),
    dict: ("mapping", "a mapping"),
}
BOUNDS = {
    "ge": "{:.15g} or more",
    "gt": "above {:.15g}",
    "le": "at most {:.15g}",
    "lt": "below {:.15g}",
}


def rule(hint: Any) -> Json:
    """What is known of a value by its type: its kind, bounds and choices, and these in words."""
    bounds: Json = {}
    if get_origin(hint) is Annotated:
        hint, *known = get_args(hint)
        bounds = {
            word: getattr(each, word) for each in known for word in BOUNDS if hasattr(each, word)
        }
    options = [each for each in get_args(hint) if each is not NoneType]
    if NoneType in get_args(hint) and len(options) == 1:
        [hint] = options
    if get_origin(hint) is Literal:
        choices = list(get_args(hint))
        return {"kind": "choice", "choices": choices, "expected": f"one of {', '.join(choices)}"}
    kind, words = KINDS.get(get_origin(hint) or hint, ("any", ""))
    expected = [words, " and ".join(BOUNDS[word].format(at) for word, at in bounds.items())]
    return {"kind": kind, **bounds, "expected": ", ".join(filter(None, expected))}


def keys(config: type = GRPOConfig, prefix: str = "") -> Json:
    """The keys of an experiment: sections, in which others are mistakes, and values."""
    sections: list[str] = []
    values: Json = {}
    hints = get_type_hints(config, include_extras=True)
    for item in fields(config):
        if item.metadata.get("omegaconf_ignore"):
            continue
        key, hint = f"{prefix}{item.name}", hints[item.name]
        plain = get_origin(hint) is Annotated  # whose arguments are its bounds
        options = [] if plain else [e for e in (hint, *get_args(hint)) if is_dataclass(e)]
        for option in options:
            below = keys(cast("type", option), f"{key}.")
            sections += [key, *below["sections"]]
            values |= below["values"]
        if not options:
            values[key] = rule(hint)
    return {"sections": sorted(sections), "values": dict(sorted(values.items()))}


def main() -> None:
    SCHEMA.write_text(json.dumps(schema(), indent=2) + "\n")
    KEYS.write_text(json.dumps(keys(), indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Enough of a cluster for `helm template --dry-run=server`: discovery, and objects to look up."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GROUPS = {
    "apps/v1": {"deployments": "Deployment", "statefulsets": "StatefulSet"},
    "batch/v1": {"jobs": "Job"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "rbac.authorization.k8s.io/v1": {"roles": "Role", "rolebindings": "RoleBinding"},
}
CORE = {
    "secrets": "Secret",
    "services": "Service",
    "serviceaccounts": "ServiceAccount",
    "configmaps": "ConfigMap",
    "persistentvolumeclaims": "PersistentVolumeClaim",
    "pods": "Pod",
}


def _resources(version: str, kinds: dict[str, str]) -> dict[str, Any]:
    found = [
        {"name": name, "singularName": "", "namespaced": True, "kind": kind, "verbs": ["get"]}
        for name, kind in kinds.items()
    ]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": found}


def _answers(objects: list[dict[str, Any]]) -> dict[str, Any]:
    answers: dict[str, Any] = {
        "/version": {"major": "1", "minor": "33", "gitVersion": "v1.33.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/api/v1": _resources("v1", CORE),
        "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    }
    for group_version, kinds in GROUPS.items():
        group, version = group_version.split("/")
        one = {"groupVersion": group_version, "version": version}
        entry = {"name": group, "versions": [one], "preferredVersion": one}
        answers["/apis"]["groups"].append(entry)
        answers[f"/apis/{group_version}"] = _resources(group_version, kinds)
    plural = {kind: name for kinds in [CORE, *GROUPS.values()] for name, kind in kinds.items()}
    for each in objects:
        version, meta = each["apiVersion"], each["metadata"]
        root = "/api/v1" if version == "v1" else f"/apis/{version}"
        where = f"{root}/namespaces/{meta['namespace']}/{plural[each['kind']]}/{meta['name']}"
        answers[where] = each
    return answers


@contextmanager
def cluster(*objects: dict[str, Any]) -> Iterator[str]:
    """Serves the objects while the block runs.

    Args:
        objects: With apiVersion, kind, and metadata of name and namespace.

    Yields:
        The address of the API.
    """
    answers = _answers(list(objects))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answers.get(self.path.split("?")[0])
            missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure"}
            missing |= {"reason": "NotFound", "code": 404}
            body = json.dumps(missing if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

"""A Kubernetes API that answers GETs from a table, as a cluster in that state would."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

SERVED = {
    "v1": ["Service", "Secret", "ConfigMap", "ServiceAccount", "PersistentVolumeClaim", "Pod"],
    "apps/v1": ["Deployment", "StatefulSet"],
    "batch/v1": ["Job"],
    "policy/v1": ["PodDisruptionBudget"],
    "networking.k8s.io/v1": ["NetworkPolicy"],
    "rbac.authorization.k8s.io/v1": ["Role", "RoleBinding"],
}


class ApiServer:
    """Listens while it is open; what the table lacks is a 404."""

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        """Path to what it answers: JSON, or text."""
        self.refused: set[str] = set()
        """Resources that may not be created."""
        table = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = urlsplit(self.path).path
                missing = {"message": f"{path} not found", "code": 404}
                self._answer(table.answers.get(path, missing), path in table.answers)

            def do_POST(self) -> None:
                """A SelfSubjectAccessReview."""
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                resource = body["spec"]["resourceAttributes"]["resource"]
                self._answer({"status": {"allowed": resource not in table.refused}}, True)

            def _answer(self, content: Any, found: bool) -> None:
                data = (content if isinstance(content, str) else json.dumps(content)).encode()
                self.send_response(200 if found else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def serve(self, served: dict[str, list[str]]) -> None:
        """Answers what discovery asks: group and version to kinds."""
        groups: dict[str, list[dict[str, str]]] = {}
        for version, kinds in served.items():
            group, _, number = version.rpartition("/")
            path = f"/apis/{version}" if group else "/api/v1"
            self.answers[path] = {"resources": [{"kind": kind} for kind in kinds]}
            if group:
                groups.setdefault(group, []).append({"groupVersion": version, "version": number})
        self.answers["/apis/"] = {
            "groups": [{"name": name, "versions": versions} for name, versions in groups.items()]
        }
        self.answers["/api/v1/"] = self.answers["/api/v1"]
        self.answers |= {f"{path}/": a for path, a in self.answers.items() if path[-1] != "/"}

    def write_kubeconfig(self, file: Path, namespace: str = "lab") -> Path:
        """A kubeconfig whose current context, `lab`, is this server."""
        context = {"cluster": "k", "user": "u", "namespace": namespace}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "lab",
            "clusters": [{"name": "k", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "lab", "context": context}],
        }
        file.write_text(json.dumps(content))
        return file

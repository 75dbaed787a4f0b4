"""external.metrics.k8s.io, as a metrics adapter would answer an HPA: one file, to run in a pod.

Asked for a metric of the Service in the selector's label `service`, it reads that Service's
/metrics, with the token in AREAL_TOKEN, and answers the largest value above 0, or none: what
docs/autoscaling.md asks of a rule.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

VERSION = "external.metrics.k8s.io/v1beta1"
PORT, METRICS_PORT = 8443, 9100


def largest(text: str, metric: str) -> float:
    """Of a metric's series in Prometheus' text; 0: there is none above."""
    values = [
        float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.split("{")[0].split(" ")[0] == metric
    ]
    return max((value for value in values if value > 0), default=0.0)


def answer(path: str) -> dict[str, Any]:
    """The reply to a GET.

    Raises:
        LookupError: There is no such path, or no label `service` in the selector.
        OSError: The Service does not answer, or refuses.
    """
    parts = urlsplit(path)
    _, found, rest = parts.path.partition(f"/apis/{VERSION}")
    if not found:
        raise LookupError(path)
    if not rest.strip("/"):
        return {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": VERSION,
            "resources": [],
        }
    metric = rest.rsplit("/", 1)[1]
    selector = parse_qs(parts.query)["labelSelector"][0]
    service = dict(each.split("=", 1) for each in selector.split(","))["service"]
    request = urllib.request.Request(
        f"http://{service}:{METRICS_PORT}/metrics",
        headers={"Authorization": f"Bearer {os.environ['AREAL_TOKEN']}"},
    )
    with urllib.request.urlopen(request, timeout=10) as reply:
        value = largest(reply.read().decode(), metric)
    item = {
        "metricName": metric,
        "metricLabels": {"service": service},
        "timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "value": str(round(value)),
    }
    return {
        "kind": "ExternalMetricValueList",
        "apiVersion": VERSION,
        "metadata": {},
        "items": [item] if value else [],
    }


class Handler(BaseHTTPRequestHandler):
    """GET alone."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answers in JSON; 404 and 502 with the reason."""
        try:
            code, body = 200, answer(self.path)
        except LookupError as error:
            code, body = 404, {"error": repr(error)}
        except OSError as error:
            code, body = 502, {"error": str(error)}
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(sys.argv[1], sys.argv[2])
    server = ThreadingHTTPServer(("", PORT), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()

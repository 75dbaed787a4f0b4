"""A real S3 server for tests: moto's, a process on a free port. What it holds dies with it."""

from __future__ import annotations

import shlex
import socket
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.store_process import StoreProcess

BUCKET = "weights"


class S3Server(StoreProcess):
    """With one bucket; whatever credentials it is given it takes, until `admit_only`."""

    log = "s3.log"

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        server = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        log = shlex.quote(str(self.folder / self.log))
        return ["/bin/sh", "-c", f"exec {shlex.join(server)} > {log} 2>&1"]

    def greets(self, connection: socket.socket) -> bool:
        connection.sendall(b"GET / HTTP/1.0\r\nHost: s3.amazonaws.com\r\n\r\n")
        return connection.recv(16).startswith(b"HTTP/1.")

    def start(self) -> None:
        super().start()
        self._ask("PUT", f"/{BUCKET}")

    def admit_only(self) -> tuple[str, str]:
        """From now on every request must be signed with this key, that is returned."""
        import boto3

        iam = boto3.client("iam", endpoint_url=self.endpoint, region_name="us-east-1")
        iam.create_user(UserName="trainer")
        policy = (
            '{"Version": "2012-10-17", "Statement": '
            '[{"Effect": "Allow", "Action": "s3:*", "Resource": "*"}]}'
        )
        iam.put_user_policy(UserName="trainer", PolicyName="s3", PolicyDocument=policy)
        key = iam.create_access_key(UserName="trainer")["AccessKey"]
        self._ask("POST", "/moto-api/reset-auth", b"0")
        return key["AccessKeyId"], key["SecretAccessKey"]

    def _ask(self, method: str, path: str, body: bytes | None = None) -> None:
        kind = {"Content-Type": "text/plain"}
        request = urllib.request.Request(self.endpoint + path, body, kind, method=method)
        urllib.request.urlopen(request, timeout=60).close()


@contextmanager
def start_s3(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A fresh server that this process, and those it starts, find by their environment."""
    server = S3Server(folder)
    server.start()
    try:
        use(monkeypatch, server.endpoint)
        yield server
    finally:
        server.kill()


def use(
    monkeypatch: pytest.MonkeyPatch, endpoint: str, key: tuple[str, str] = ("test", "secret-test")
) -> None:
    """What a pod's environment says."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key[0])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key[1])
    monkeypatch.setenv("AWS_REGION", "us-east-1")

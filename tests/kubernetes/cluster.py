"""kubectl and helm, on whatever cluster KUBECONFIG names; every wait has a deadline."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "areal"
Json = dict[str, Any]


class Failed(Exception):
    """A stage did not come out as it must."""


def program(name: str) -> str:
    """On PATH, or brought by `make setup`."""
    path = os.pathsep.join((os.environ.get("PATH", ""), str(Path(sys.executable).parent)))
    found = shutil.which(name, path=path)
    if found is None:
        raise Failed(f"{name} is not there")
    return found


def wait(what: str, condition: Callable[[], Any], timeout: float, pause: float = 1.0) -> Any:
    """The first truthy answer; a command that fails meanwhile counts as no answer."""
    deadline, last = time.monotonic() + timeout, ""
    while time.monotonic() < deadline:
        try:
            if answer := condition():
                return answer
        except subprocess.SubprocessError as error:
            last = str(getattr(error, "stderr", "") or error).strip()[-300:]
        time.sleep(pause)
    raise Failed(f"{what}: not within {timeout:.0f} s {last}")


class Cluster:
    """One namespace of it, and the release `areal` there."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def _run(self, command: list[str], timeout: float, check: bool) -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
        if check and done.returncode:
            shown = " ".join(command[1:8])
            raise subprocess.CalledProcessError(
                done.returncode, shown, done.stdout, f"{shown}: {done.stderr}"
            )
        return done.stdout

    def kubectl(self, *arguments: str, timeout: float = 60.0, check: bool = True) -> str:
        """Its output."""
        command = [program("kubectl"), "-n", self.namespace, *arguments]
        return self._run(command, timeout, check)

    def helm(self, *arguments: str, timeout: float = 1000.0) -> str:
        """Its output."""
        command = [program("helm"), "-n", self.namespace, *arguments]
        return self._run(command, timeout, check=True)

    def get(self, *what: str) -> list[Json]:
        """The objects that `kubectl get` finds."""
        found = json.loads(self.kubectl("get", *what, "-o", "json"))
        items: list[Json] = found.get("items", [found])
        return items

    def pods(self, component: str) -> list[Json]:
        """Of the release, also those that are leaving."""
        label = f"app.kubernetes.io/instance=areal,app.kubernetes.io/component={component}"
        return self.get("pods", "-l", label)

    def staying(self, component: str) -> list[Json]:
        """Those that are ready and not leaving."""
        return [p for p in self.pods(component) if is_ready(p) and not is_leaving(p)]

    def secret(self, key: str) -> str:
        """Of the release's generated Secret."""
        (secret,) = self.get("secret", "areal-auth")
        return base64.b64decode(secret["data"][key]).decode()

    def read(self, path: str) -> str:
        """A file of the shared volume."""
        return self.kubectl("exec", self.mounting(), "--", "cat", path)

    def mounting(self) -> str:
        """A pod that mounts the shared volume."""
        for component in ("weight-sync", "rollout"):
            for pod in self.staying(component):
                return str(pod["metadata"]["name"])
        raise subprocess.SubprocessError("no pod to read through")

    def copy(self, pod: str, source: str, target: Path) -> None:
        """Unpacks a folder of a pod into another one here."""
        command = [program("kubectl"), "-n", self.namespace, "exec", pod, "--"]
        # 1: a file grew meanwhile (weight-sync renews its lease); Redis reads a copy cut short.
        command += ["sh", "-c", f"tar -C {source} -cf - . || test $? = 1"]
        done = subprocess.run(command, capture_output=True, check=True, timeout=120)
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as tar:
            tar.extractall(target, filter="data")

    def trainer_job(self) -> Json:
        """The one PyTorchJob."""
        jobs = [j for j in self.get("pytorchjobs") if "deletionTimestamp" not in j["metadata"]]
        if len(jobs) != 1:
            raise subprocess.SubprocessError(f"{len(jobs)} PyTorchJobs")
        return jobs[0]

    @contextlib.contextmanager
    def forward(self, service: str, port: int) -> Iterator[str]:
        """`kubectl port-forward`; yields 127.0.0.1:PORT."""
        command = [program("kubectl"), "-n", self.namespace, "port-forward", f"svc/{service}"]
        process = subprocess.Popen(
            [*command, f":{port}"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"127\.0\.0\.1:(\d+)", line)
            if not found:
                raise Failed(f"port-forward to {service}: {line.strip()}")
            yield found[0]
        finally:
            process.terminate()
            process.wait(10)


def is_leaving(pod: Json) -> bool:
    """Whether it has been deleted, and is not gone yet."""
    return "deletionTimestamp" in pod["metadata"]


def condition(thing: Json, kind: str) -> Json | None:
    """A condition that is true."""
    for each in thing.get("status", {}).get("conditions", []):
        if each["type"] == kind and each["status"] == "True":
            found: Json = each
            return found
    return None


def is_ready(pod: Json) -> bool:
    """Ready, gates included."""
    return condition(pod, "Ready") is not None


def ready_seconds(pod: Json) -> float:
    """From the start of its container to ready; Kubernetes keeps whole seconds."""
    ready = condition(pod, "Ready")
    started = pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]
    assert ready is not None
    return (time_of(ready["lastTransitionTime"]) - time_of(started)).total_seconds()


def time_of(text: str) -> datetime:
    """As Kubernetes writes it."""
    return datetime.fromisoformat(text.replace("Z", "+00:00"))

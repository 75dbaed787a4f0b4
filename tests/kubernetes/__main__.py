"""`make e2e-kubernetes`: a release on a real cluster trains, is scaled, upgraded, loses pods, ends.

The cluster is the one that KUBECONFIG names; its nodes must have the images areal/*:TAG, and an
operator for PyTorchJobs. Meanwhile a census of the pods' connections is taken (`census.py`), which
needs a node that is this machine. Ends with a table, which is also written to
docs/e2e-kubernetes.md; with --scarce (`scarce.py`) to docs/e2e-kubernetes-scarce.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from tests.certificates import Authority
from tests.kubernetes import upkeep
from tests.kubernetes.cluster import ROOT, Cluster, Failed
from tests.kubernetes.scarce import Scarce
from tests.kubernetes.sockets import Watcher
from tests.kubernetes.stages import TLS_SECRET, Run, Settings, node_address

DOCS = ROOT / "docs"
COMPONENTS = ("gateway", "reward", "rollout", "buffer", "weight-sync", "sglang", "nats", "redis")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make e2e-kubernetes", description=__doc__)
    add = parser.add_argument
    add("--namespace", default="areal-e2e", help="namespace that the test creates")
    add("--tag", default="dev", help="tag of the images areal/*")
    add("--build", action="store_true", help="first build the images on this machine")
    add("--data", default="/var/lib/areal-e2e", help="folder of the node; '': volumes of --values")
    add(
        "--values",
        action="append",
        type=Path,
        default=[],
        help="values files, e.g. with a storage class",
    )
    add(
        "--steps",
        type=int,
        default=400,
        help="train steps, at least; with less than 200 the reward may not be checked",
    )
    add("--keep", action="store_true", help="keep the release if a stage fails")
    add(
        "--scarce", action="store_true", help="test one GPU (faked), memory for one trainer, an HPA"
    )
    add("--next-tag", default="", help="another tag of the images, to which it upgrades")
    add(
        "--no-census",
        action="store_true",
        help="check no connections and stop no leader: the node is another machine",
    )
    add(
        "--report",
        type=Path,
        help="page to write; default: docs/e2e-kubernetes.md, or …-scarce.md with --scarce",
    )
    return parser.parse_args()


def prepare(cluster: Cluster, scratch: Path) -> Authority:
    """A namespace with a certificate for every service and for the node."""
    cluster.kubectl("create", "namespace", cluster.namespace)
    authority = Authority.make(scratch / "authority")
    services = ("buffer", "rollout", "reward", "weight-sync", "trainer")
    names = [f"DNS:areal-{name}" for name in services]
    certificate, key = authority.certificate("areal", *names, f"IP:{node_address(cluster)}")
    cluster.kubectl(
        *("create", "secret", "generic", TLS_SECRET, f"--from-file=tls.crt={certificate}"),
        *(f"--from-file=tls.key={key}", f"--from-file=ca.crt={authority.ca}"),
    )
    return authority


def stages(run: Run, here: bool) -> list[tuple[str, Callable[[], str]]]:
    """In order; it trains from the second to the last but two.

    Args:
        run: The release.
        here: Whether the node is this machine, whose processes can be seen and stopped.
    """
    if isinstance(run, Scarce):
        return [
            ("one GPU, memory for one trainer", run.make_scarce),
            ("the trainer's pod comes first", run.trainer_first),
            ("helm install --wait", run.install),
            ("training begins", run.trains),
            ("autoscaling, by helm upgrade", run.autoscale),
            ("the HPA reads the recommendation", run.follow),
        ]
    deletions = [(f"delete a pod of {c}", lambda c=c: run.delete(c)) for c in COMPONENTS]
    return [
        ("helm install --wait", run.install),
        ("helm test", run.test),
        ("a gRPC client outside the cluster", run.outside),
        ("kubectl scale deploy/sglang", run.scale),
        ("helm upgrade, changed recipe", run.upgrade),
        ("helm rollback", run.rollback),
        ("helm upgrade, another chart version", run.bump),
        *([("helm upgrade, another image tag", run.retag)] if run.settings.next_tag else []),
        *([("weight-sync's leader is lost", run.take_over)] if here else []),
        ("secrets are rotated", run.rotate),
        *deletions,
        ("delete the PyTorchJob's master", lambda: run.delete("trainer")),
        ("helm history", run.revisions),
        ("the run ends", run.finish),
        ("accounting", run.books),
    ]


def report(run: Run, began: float) -> str:
    """The page: a table of the stages, then notes."""
    load = os.getloadavg()[1]
    versions = json.loads(run.cluster.kubectl("version", "-o", "json"))
    when = datetime.now(UTC).strftime("%Y-%m-%d")
    rows = "\n".join(f"| {name} | {s:.0f} s | {text} |" for name, s, text in run.lines)
    notes = "\n".join(f"- {note}" for note in run.notes)
    where = f"Kubernetes {versions['serverVersion']['gitVersion']}, {os.cpu_count()} cores"
    what, how = "", f"{run.last} steps with 1 master and 1 worker"
    if isinstance(run, Scarce):
        what = " ARGS=--scarce"
        how = (
            "1 master that requests the only GPU (declared in the node's status; the master trains "
            "on CPUs)"
        )
    return (
        f"# Results of `make e2e-kubernetes{what}`\n\n"
        f"The command wrote this page on {when}. [Kubernetes](kubernetes.md#tested) describes what "
        "the command does.\n\n"
        f"- Cluster: {where}; the load average was {load:.0f} at the end.\n"
        f"- Run: {how}; {time.monotonic() - began:.0f} s in total.\n\n"
        f"| stage | time | result |\n|---|---|---|\n{rows}\n\n{notes}\n"
    )


def go_through(run: Run, watch: bool) -> None:
    """Every stage, with a census of connections until the release is removed.

    Raises:
        Failed: By a stage, or by the census after it.
    """
    watcher = Watcher(run.cluster) if watch else None

    def take(name: str, stage: Callable[[], str]) -> None:
        print(f"{name} …", end=" ", flush=True)
        started = time.monotonic()
        text = stage()
        run.lines.append((name, time.monotonic() - started, text))
        print(f"{run.lines[-1][1]:.0f} s: {text}", flush=True)

    try:
        for name, stage in stages(run, watch):
            if watcher:
                watcher.stage = name
            take(name, stage)
            if watcher:
                watcher.check()
    finally:
        if watcher:
            watcher.close()
    run.notes += watcher.census.report() if watcher else ["No census of connections was taken."]
    take("helm uninstall", run.uninstall)


def clean(run: Run) -> None:
    """The cluster and the node as they were."""
    cluster, settings = run.cluster, run.settings
    run.restore()
    with suppress(subprocess.SubprocessError):  # there may be none
        cluster.helm("uninstall", "areal", timeout=300.0)
    cluster.kubectl("delete", "namespace", cluster.namespace, timeout=300)
    shutil.rmtree(settings.scratch, ignore_errors=True)
    if settings.data and os.access(settings.data, os.W_OK):  # the node is this machine
        shutil.rmtree(settings.data, ignore_errors=True)


def main() -> int:
    arguments = parse()
    if arguments.build:
        command = ["make", "images", f"TAG={arguments.tag}"]
        subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"DOCKER_BUILDKIT": "0"})
    scratch = Path(tempfile.mkdtemp(prefix="areal-e2e-"))
    cluster, began, code = Cluster(arguments.namespace), time.monotonic(), 1
    folder = f"{arguments.data}/{scratch.name}" if arguments.data else ""
    settings = Settings(
        arguments.tag, folder, arguments.values, arguments.steps, scratch, arguments.next_tag
    )
    kind = Scarce if arguments.scarce else Run
    try:
        authority = prepare(cluster, scratch)
        if kind is Run:
            upkeep.limit(cluster, scratch)
        run = kind(cluster, settings, authority)
    except subprocess.CalledProcessError as error:
        sys.exit(f"before the first stage: {error.stderr}")
    try:
        go_through(run, not arguments.no_census)
        name = "e2e-kubernetes-scarce.md" if arguments.scarce else "e2e-kubernetes.md"
        file = arguments.report or DOCS / name
        file.write_text(report(run, began))
        print(file.read_text())
        code = 0
    except (Failed, subprocess.SubprocessError) as error:
        print(f"FAILED: {getattr(error, 'stderr', '') or error}", flush=True)
    finally:
        if code == 0 or not arguments.keep:
            clean(run)
    return code


if __name__ == "__main__":
    sys.exit(main())

"""docker-compose.yaml of a fresh clone: it learns, scales, survives, and leaves nothing.

Prints a table of what was done and how long it took (`make e2e-compose`).
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.chaos.books import ENDS, check_books, read_ledger
from tests.e2e.compose.stack import Project, docker, wait

ROOT = Path(__file__).resolve().parents[3]
STEPS = int(os.environ.get("E2E_STEPS", "400"))
SERVICES = ("nats", "gateway", "reward", "inference", "rollout", "buffer", "weight-sync", "redis")
SERVICES += ("trainer",)
PATIENCE_S = 600.0


class Table:
    """What was done, how long it took, what was seen; printed as it comes."""

    def row(self, what: str, seconds: float, seen: str = "") -> None:
        print(f"| {what:<44} | {seconds:7.1f} | {seen:<60} |", flush=True)


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Project]:
    checkout = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(checkout)], check=True)
    project = Project(
        checkout,
        "areal-e2e-compose",
        AREAL_TAG="e2e",
        AREAL_ARGS=f"total_train_steps={STEPS} rollout.lease_ttl_s=10 checkpoint.freq_steps=10",
    )
    try:
        yield project
    finally:
        project.compose("down", "--volumes", "--timeout", "10", check=False)


@pytest.mark.timeout(7200)
def test_compose_up_when_every_service_is_killed_in_turn_then_it_learns_and_the_books_agree(
    project: Project, tmp_path: Path
) -> None:
    table = Table()
    print(f"\n| {'what':<44} | seconds | {'seen':<60} |\n|{'-' * 46}|{'-' * 9}|{'-' * 62}|")
    began = time.monotonic()
    project.compose("build", timeout=3600)
    table.row("docker compose build", time.monotonic() - began)
    began = time.monotonic()
    project.compose("up", "--detach", "--wait", timeout=1800)
    table.row("docker compose up --wait", time.monotonic() - began, "every service is healthy")
    assert project.refused_without_token()
    seconds = wait("10 steps", lambda: project.step() >= 10, PATIENCE_S)
    table.row("the first 10 steps", seconds, f"{project.servers()} inference servers")

    _scale(project, table, 4)
    for service in SERVICES:
        _break(project, table, f"{service} crashes", service, _crash)
    _scale(project, table, 1)
    for service in SERVICES:
        _break(project, table, f"compose kill, start {service}", service, _kill_and_start)

    began, before = time.monotonic(), project.step()
    trainer = project.ids("trainer")[0]
    wait("the trainer's end", lambda: not project.state(trainer)["Running"], 3600)
    state = project.state(trainer)
    assert state["ExitCode"] == 0, project.compose("logs", "--tail", "30", "trainer")
    table.row("the rest of the run", time.monotonic() - began, f"steps {before} to {STEPS}")
    _check_books(project, table, tmp_path)

    began = time.monotonic()
    project.compose("down", "--volumes")
    for kind in (["ps", "--all"], ["volume", "ls"], ["network", "ls"]):
        label = f"label=com.docker.compose.project={project.name}"
        assert not docker(*kind, "--quiet", "--filter", label).split(), kind
    table.row("docker compose down --volumes", time.monotonic() - began, "nothing is left")


def _scale(project: Project, table: Table, count: int) -> None:
    """Changes the number of inference servers while it trains."""
    step, began = project.step(), time.monotonic()
    project.compose("up", "--detach", "--no-recreate", "--scale", f"inference={count}", "inference")
    wait(
        f"{count} servers",
        lambda: project.servers() == count == len(project.status().get("servers", [])),
        PATIENCE_S,
    )
    seconds = time.monotonic() - began
    wait("a step after that", lambda: project.step() > step, PATIENCE_S)
    table.row(f"up --scale inference={count}", seconds, f"{count} serve the current version")


def _crash(project: Project, service: str) -> None:
    """The restart policy brings it back."""
    container = project.ids(service)[0]
    restarts = project.state(container)["RestartCount"]
    project.crash(service)
    wait(
        f"the engine to restart {service}",
        lambda: project.state(container)["RestartCount"] > restarts,
        60,
    )


def _kill_and_start(project: Project, service: str) -> None:
    """What an operator kills, an operator starts."""
    project.kill(service)
    project.compose("start", service)


def _break(
    project: Project, table: Table, what: str, service: str, blow: Callable[[Project, str], None]
) -> None:
    """Until the service is healthy and training is further than it was: from the blow on."""
    wait("the gateway's status", lambda: project.step() >= 0, PATIENCE_S)
    step, began = project.step(), time.monotonic()
    assert step < STEPS - 10, f"the run is nearly over before {what}: more steps (E2E_STEPS)"
    blow(project, service)
    wait(f"{service} to be healthy", lambda: project.serving(service), PATIENCE_S)
    healthy = time.monotonic() - began
    wait(f"a step after {what}", lambda: project.step() > step, PATIENCE_S)
    table.row(what, healthy, f"healthy; beyond step {step} after {time.monotonic() - began:.1f} s")


def _check_books(project: Project, table: Table, scratch: Path) -> None:
    """The ledger, the rows and the batches of the run, read from copies of the volumes."""
    began = time.monotonic()
    time.sleep(5)  # its last look at the ledger, after the surplus was cancelled
    ledger_says = project.status()["ledger"]
    accounting = {"submitted": ledger_says["submitted"], **ledger_says["counts"]}
    run_dir = scratch / "run"
    project.compose("cp", "trainer:/data/runs/arithmetic/demo/.", str(run_dir))
    project.compose("stop", "redis")
    project.compose("cp", "redis:/stores/redis", str(run_dir / "redis"))
    (run_dir / "summary.json").write_text(
        json.dumps({"status": "finished", "accounting": accounting})
    )
    ledger = read_ledger(run_dir, "arithmetic/demo", scratch)
    checks = check_books(ledger, run_dir, steps=STEPS, batch=64, problems=6000, eta=2)
    seconds = time.monotonic() - began
    failed = []
    for check in checks:
        table.row(f"books: {check.name}", seconds, check.detail if check.holds else "NO")
        failed += [] if check.holds else [f"{check.name}: {check.detail}"]
    assert not failed, failed
    assert accounting["submitted"] == sum(accounting[state] for state in ENDS), accounting
    assert accounting["dead_lettered"] == 0, accounting
    results = json.loads((run_dir / "trainer.json").read_text())
    before, after = results["heldout_before"], results["heldout_after"]
    table.row("held-out accuracy", seconds, f"{before:.2f} -> {after:.2f}")
    assert after >= before + 0.2, results

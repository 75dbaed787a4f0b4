"""`areal run --on slurm` on a real cluster: two nodes of this machine (`make e2e-slurm`)."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster_runs import arguments, check_books, rows_of
from tests.integration.stack_tools import RunningStack, areal_background, end_all, eventually
from tests.slurm_cluster import jobs, missing_programs, slurm_cluster

from areal_launch.processes.descendants import find_tagged

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not os.environ.get("AREAL_TEST_SLURM"), reason="make e2e-slurm runs these"),
    pytest.mark.skipif(bool(missing_programs()), reason=missing_programs()),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as environment:
        saved = {key: os.environ.get(key, "") for key in environment}
        os.environ.update(environment)
        yield environment
        os.environ.update({key: value for key, value in saved.items() if value})
        if not saved["SLURM_CONF"]:
            del os.environ["SLURM_CONF"]


def test_slurm_when_two_nodes_train_and_a_server_is_killed_then_it_finishes_and_ends_clean(
    cluster: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    steps = 6
    stack = RunningStack(tmp_path / "runs" / "arithmetic" / "two")
    log = tmp_path / "out.jsonl"
    launcher = areal_background(
        *("run", "--on", "slurm", "--json"),
        *arguments(tiny_model, "two", steps, "sglang:d2+fsdp:d2"),
        *("stack.ranks_per_node=1", "stack.slurm.sbatch=[--cpus-per-task=1]"),
        cwd=tmp_path,
        log=log,
    )
    try:
        eventually(lambda: len(rows_of(stack)) >= 2, "two steps", 400.0)
        [job] = jobs(cluster)
        assert stack.content["launcher"]["slurm_job"] == job
        assert (stack.run_dir / "secrets" / "token").stat().st_mode & 0o077 == 0
        stack_id = stack.content["stack_id"]
        # Both nodes are this machine: the step's process carries the stack's tag. So do srun and
        # its keeper, whose arguments end with the same command.
        (server,) = (
            process
            for process in find_tagged(stack_id, "inference-1")
            if process.cmdline()[1:3] == ["-m", "areal_inference"]
        )
        server.kill()
        assert launcher.wait(600.0) == 0, log.read_text() + stack.log("launcher")
    finally:
        launcher.kill()
        left = end_all(stack) if stack.content else 0
    assert left == 0
    assert jobs(cluster) == []
    assert not (stack.run_dir / "secrets").exists()
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert [line["step"] for line in lines if line["event"] == "step"] == list(range(1, steps + 1))
    summary = json.loads((stack.run_dir / "summary.json").read_text())
    assert {**summary, "event": "summary"} == lines[-1]
    assert summary["status"] == "finished"
    assert summary["restarts"] == {"inference-1": 1}
    check_books(summary, steps)


def test_slurm_when_interrupted_then_the_job_ends_and_the_next_one_resumes(
    cluster: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    steps = 4
    stack = RunningStack(tmp_path / "runs" / "arithmetic" / "again")
    command = [
        *("run", "--on", "slurm", *arguments(tiny_model, "again", steps, "sglang:d1+fsdp:d1")),
        "stack.slurm.sbatch=[--cpus-per-task=2]",
    ]
    launcher = areal_background(*command, cwd=tmp_path, log=tmp_path / "first.log")
    try:
        eventually(lambda: len(rows_of(stack)) >= 1, "a step", 300.0)
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(240.0) == 130, (tmp_path / "first.log").read_text()
    finally:
        launcher.kill()
    assert jobs(cluster) == []
    assert json.loads((stack.run_dir / "summary.json").read_text())["status"] == "interrupted"
    assert not stack.processes()

    again = areal_background(*command, cwd=tmp_path, log=tmp_path / "second.log")
    try:
        assert again.wait(400.0) == 0, (tmp_path / "second.log").read_text()
    finally:
        again.kill()
    assert jobs(cluster) == []
    summary = json.loads((stack.run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert [row["step"] for row in rows_of(stack)] == list(range(1, steps + 1))
    check_books(summary, steps)


def test_slurm_when_the_job_cannot_start_then_the_error_is_the_output_of_the_job(
    cluster: dict[str, str], tiny_model: Path, tmp_path: Path
) -> None:
    log = tmp_path / "out.log"
    launcher = areal_background(
        *("run", "--on", "slurm", *arguments(tiny_model, "bad", 2, "sglang:d1+fsdp:d1")),
        *(
            "stack.slurm.sbatch=[--cpus-per-task=1]",
            "stack.slurm.setup=echo no such module; exit 3",
        ),
        cwd=tmp_path,
        log=log,
    )
    assert launcher.wait(120.0) == 1
    assert "FAILED" in log.read_text()
    assert "no such module" in log.read_text().splitlines()[-1]

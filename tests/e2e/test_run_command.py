"""`areal run` from end to end with a real recipe: finishes, survives, resumes, accounts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from tests.e2e.cluster_runs import BATCH, SAMPLES, arguments, check_books, rows_of
from tests.integration.stack_tools import RunningStack, areal, areal_background, eventually
from tests.kept import check_kept

pytestmark = pytest.mark.timeout(300)


def test_run_when_the_trainer_is_killed_then_it_resumes_and_the_books_balance(
    tiny_model: Path, tmp_path: Path
) -> None:
    steps = 5
    stack = RunningStack(tmp_path / "runs" / "arithmetic" / "killed")
    log = tmp_path / "out.jsonl"
    launcher = areal_background(
        "run",
        "--json",
        *arguments(tiny_model, "killed", steps, "sglang:d2+fsdp:d1"),
        cwd=tmp_path,
        log=log,
    )
    try:
        eventually(lambda: len(rows_of(stack)) >= 2, "two steps", 120.0)
        os.kill(stack.process("trainer")["pid"], signal.SIGKILL)
        assert launcher.wait(180.0) == 0, log.read_text()
        stack.assert_gone()
    finally:
        launcher.kill()
        stack.clean_up()
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    assert [line["step"] for line in lines if line["event"] == "step"][-1] == steps
    assert lines[-1]["event"] == "summary"
    summary = json.loads((stack.run_dir / "summary.json").read_text())
    assert {**summary, "event": "summary"} == lines[-1]
    assert summary["status"] == "finished"
    assert summary["steps"] == steps
    assert summary["restarts"] == {"trainer": 1}
    assert [row["step"] for row in rows_of(stack)] == list(range(1, steps + 1))
    check_books(summary, steps)
    assert summary["samples"] == steps * BATCH * SAMPLES
    assert 0 <= summary["heldout_before"] <= 1
    assert 0 <= summary["heldout_after"] <= 1
    assert summary["weight_updates"]["count"] >= steps
    assert summary["weight_updates"]["aborted_requests"] == 0
    assert summary["cpu_s"] > 0
    assert 0 < summary["memory_mb"]["total"] < 5 * 1024
    assert (stack.run_dir / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert (stack.run_dir / "config.yaml").stat().st_mode & 0o077 == 0
    check_kept(stack.run_dir, steps)
    shown = areal("show", "--json", "--run", str(stack.run_dir), cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    found = json.loads(shown.stdout)
    assert found["step"] == steps
    means = [group["reward_mean"] for group in found["groups"]]
    assert sum(means) / len(means) == pytest.approx(rows_of(stack)[-1]["reward/mean"], abs=1e-5)
    done = areal("export", "--to", "all.jsonl", "--run", str(stack.run_dir), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "all.jsonl").read_text().splitlines()) == steps * BATCH * SAMPLES


@pytest.mark.long
def test_run_when_interrupted_then_running_it_again_finishes_it_on_two_ranks(
    tiny_model: Path, tmp_path: Path
) -> None:
    steps = 4
    stack = RunningStack(tmp_path / "runs" / "arithmetic" / "again")
    command = arguments(tiny_model, "again", steps, "sglang:d1+fsdp:d2")
    launcher = areal_background("run", *command, cwd=tmp_path, log=tmp_path / "out.log")
    try:
        eventually(lambda: len(rows_of(stack)) >= 1, "a step", 150.0)
        assert len(stack.processes()) >= 8
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(90.0) == 130, (tmp_path / "out.log").read_text()
        stack.assert_gone()
        interrupted = json.loads((stack.run_dir / "summary.json").read_text())
        assert interrupted["status"] == "interrupted"

        again = areal("run", *command, cwd=tmp_path, timeout=180.0)
        assert again.returncode == 0, again.stdout + again.stderr + stack.log("trainer")
        stack.assert_gone()
    finally:
        launcher.kill()
        stack.clean_up()
    summary = json.loads((stack.run_dir / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert [row["step"] for row in rows_of(stack)] == list(range(1, steps + 1))
    check_books(summary, steps)
    assert "finished after 4 steps" in again.stdout
    spans = [(each["from_step"], each["to_step"]) for each in summary["invocations"]]
    assert spans == [(0, interrupted["steps"]), (interrupted["steps"], steps)]
    assert summary["wall_s"] > interrupted["wall_s"]

    changed = areal("run", *command, "gconfig.temperature=0.5", cwd=tmp_path)
    assert changed.returncode == 1
    assert "gconfig.temperature 1.0 -> 0.5" in changed.stderr
    assert json.loads((stack.run_dir / "summary.json").read_text()) == summary


@pytest.mark.long
def test_run_when_the_recipe_fails_then_exit_code_and_cause_on_the_last_screen(
    tiny_model: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "fails.py"
    recipe.write_text(
        "def main(argv):\n"
        "    from areal_torch.training.session import current_session\n"
        "    current_session()  # beyond this, no check before the run can follow\n"
        "    raise RuntimeError('the moon is in the way')\n"
    )
    stack = RunningStack(tmp_path / "runs" / "experiment" / "trial0")
    try:
        done = areal(
            *("run", str(recipe), f"model.path={tiny_model}", "model.context_length=64"),
            *("allocation_mode=sglang:d1+fsdp:d1", "stack.max_restarts=1"),
            cwd=tmp_path,
        )
        stack.assert_gone()
    finally:
        stack.clean_up()
    assert done.returncode == 1
    assert "the moon is in the way" in done.stdout
    assert json.loads((stack.run_dir / "summary.json").read_text())["status"] == "failed"

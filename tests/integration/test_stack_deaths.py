"""Whatever dies is started again; when the stack ends, by any death, nothing stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.integration.stack_tools import RunningStack, areal, areal_background, eventually

pytestmark = pytest.mark.timeout(300)

# Everything that a stack without trainer consists of; a wave is killed at once.
WAVES = (
    ("redis", "reward", "gateway", "inference-0"),
    ("nats", "buffer", "weight-sync", "rollout-0"),
)
PROCESSES = tuple(name for wave in WAVES for name in wave)
Start = Callable[[], tuple[RunningStack, subprocess.Popen[bytes]]]


@pytest.fixture
def start(tiny_model: Path, tmp_path: Path) -> Iterator[Start]:
    """Starts `areal up` in the foreground; the same trial each time."""
    stack = RunningStack(tmp_path / "runs" / "deaths" / "t0")
    arguments = (
        f"model.path={tiny_model}",
        "model.context_length=128",
        "experiment_name=deaths",
        "trial_name=t0",
        "allocation_mode=sglang:d1+fsdp:d1",
        "rollout.lease_ttl_s=5",
        "stack.max_restarts=20",
    )

    def begin() -> tuple[RunningStack, subprocess.Popen[bytes]]:
        (stack.run_dir / "stack.json").unlink(missing_ok=True)
        launcher = areal_background("up", *arguments, cwd=tmp_path, log=tmp_path / "up.log")
        eventually(lambda: stack.content, "stack.json is there", 30.0)
        return stack, launcher

    yield begin
    stack.clean_up()


def submit_and_wait(stack: RunningStack, cwd: Path, prefix: str) -> None:
    """The whole path works: client, buffer, rollout, inference, reward, weight-sync's list."""
    rows = [{"task_id": f"{prefix}-{i}", "prompt": f"{i}+1=", "answer": "1"} for i in range(8)]
    done = areal(
        *("submit", "-", "--wait", "--timeout", "60", "--run", str(stack.run_dir)),
        cwd=cwd,
        stdin="".join(json.dumps(row) + "\n" for row in rows),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "8 delivered" in done.stdout


def test_stack_when_each_process_is_killed_then_it_is_restarted_and_ctrl_c_ends_all(
    start: Start, tmp_path: Path
) -> None:
    stack, launcher = start()
    stack.wait_ready()
    addresses = {name: stack.address(name) for name in PROCESSES}
    for wave in WAVES:
        before = {name: stack.process(name)["pid"] for name in wave}
        for pid in before.values():
            os.kill(pid, signal.SIGKILL)
        for name in wave:

            def restarted(name: str = name) -> bool:
                entry = stack.process(name)
                return entry["restarts"] >= 1 and entry["state"] == "up"

            eventually(restarted, f"{name} is up again", 60.0)
            assert stack.process(name)["pid"] != before[name]
    assert {name: stack.address(name) for name in PROCESSES} == addresses, "ports are kept"
    submit_and_wait(stack, tmp_path, "after-deaths")
    for name in PROCESSES:
        assert f"{name} ended with signal 9; restart 1 of 20" in stack.log("launcher")

    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(60.0) == 0
    stack.assert_gone()
    assert stack.state() == "stopped"


def test_stack_when_launcher_is_killed_then_nothing_stays_and_the_trial_can_go_on(
    start: Start, tmp_path: Path
) -> None:
    stack, launcher = start()
    stack.wait_ready()
    submit_and_wait(stack, tmp_path, "first")
    assert len(stack.processes()) >= len(PROCESSES)
    # A guard that was killed first is replaced by one that does the same.
    guard = stack.content["guard"]["pid"]
    os.kill(guard, signal.SIGKILL)
    eventually(lambda: stack.content["guard"]["pid"] not in (0, guard), "a new guard", 20.0)
    launcher.kill()
    launcher.wait(60.0)
    stack.assert_gone()

    stack, launcher = start()
    stack.wait_ready()
    submit_and_wait(stack, tmp_path, "second")
    status = areal("status", "--json", "--run", str(stack.run_dir), cwd=tmp_path)
    accounts = json.loads(status.stdout)["accounting"]
    assert accounts["delivered"] == 16, "the ledger of the killed stack is still there"
    stopped = areal("down", "--run", str(stack.run_dir), cwd=tmp_path)
    assert stopped.returncode == 0, stopped.stderr
    assert launcher.wait(60.0) == 0
    stack.assert_gone()


def test_stack_when_interrupted_while_it_starts_then_nothing_stays(start: Start) -> None:
    stack, launcher = start()
    eventually(lambda: any(p["pid"] for p in stack.content["processes"].values()), "a child", 30.0)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60.0) == 0
    stack.assert_gone()


def test_stack_when_launcher_is_killed_while_it_starts_then_nothing_stays(start: Start) -> None:
    stack, launcher = start()
    eventually(lambda: any(p["pid"] for p in stack.content["processes"].values()), "a child", 30.0)
    launcher.kill()
    launcher.wait(60.0)
    stack.assert_gone()


def test_stack_when_a_service_cannot_live_then_given_up_by_name_and_nothing_stays(
    tmp_path: Path,
) -> None:
    """Its log is quoted, the exit code says so."""
    broken = tmp_path / "broken"
    broken.mkdir()
    config = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    config["quantization_config"] = {"quant_method": "awq"}
    (broken / "config.json").write_text(json.dumps(config))
    (broken / "model.safetensors").write_bytes(b"")
    (broken / "tokenizer.json").write_text("{}")
    done = areal(
        *("up", f"model.path={broken}", "experiment_name=deaths", "trial_name=t0"),
        *("allocation_mode=sglang:d1+fsdp:d1", "stack.max_restarts=1"),
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "areal: inference-0 ended with exit code" in done.stderr
    assert "quantization_config" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    stack = RunningStack(tmp_path / "runs" / "deaths" / "t0")
    assert stack.state() == "failed"
    stack.assert_gone()

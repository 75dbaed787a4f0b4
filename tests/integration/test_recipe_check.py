"""`areal check`, and `areal run` which checks by itself: as commands, with processes that hang."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import time
from pathlib import Path

import pytest
from tests.integration.stack_tools import RunningStack, areal, areal_argv, environment, eventually

from areal_torch.models.tiny import save_tokenizer

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
import os, re, sys, time
from areal import GRPOConfig, FSDPPPOActor, RemoteSGLangEngine, RLVRWorkflow, StatefulLoader
from areal import load_expr_config

def reward_fn(completions, **data):
    {reward}

def main(argv):
    config, _ = load_expr_config(argv, GRPOConfig)
    rollout, actor = RemoteSGLangEngine(config.rollout), FSDPPPOActor(config.actor)
    rows = StatefulLoader([{{"prompt": "1+1="}}])
    batch = rollout.prepare_batch(rows, RLVRWorkflow(reward_fn, config.gconfig))
"""
REWARD_LINE = RECIPE[: RECIPE.index("{reward}")].count("\n") + 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a recipe is run: a model as far as anything looks at it before a start."""
    model = tmp_path / "model"
    model.mkdir()
    save_tokenizer(model)
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    return tmp_path


def write(folder: Path, reward: str) -> list[str]:
    (folder / "recipe.py").write_text(RECIPE.format(reward=reward))
    return ["recipe.py", "model.path=model", "gconfig.max_new_tokens=64", "reward.timeout_s=1"]


def test_check_when_all_is_well_then_exit_code_0_without_torch_within_seconds(
    folder: Path,
) -> None:
    arguments = write(folder, "return float('torch' in sys.modules)")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = areal("check", *arguments, "--json", cwd=folder)
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stdout + done.stderr
    # Of both its processes; a busy machine takes longer, but spends no more.
    assert spent.ru_utime + spent.ru_stime - before.ru_utime - before.ru_stime < 10.0
    findings = {each["stage"]: each for each in json.loads(done.stdout)}
    assert {each["verdict"] for each in findings.values()} == {"ok"}
    assert findings["reward"]["said"] == "reward_fn: 0 to 0"
    assert not (folder / "runs").exists()


@pytest.mark.parametrize(
    ("reward", "said"),
    [
        ("return completions['score']", "reward_fn raised TypeError: string indices must be"),
        ("time.sleep(3600)", "reward_fn took longer than reward.timeout_s = 1 s"),
        # Backtracking forever, in C code that no other thread can interrupt.
        (
            "return float(bool(re.match('(a+)+$', 'a' * 60 + 'b')))",
            "reward_fn took longer than reward.timeout_s = 1 s",
        ),
        ("os._exit(3)", "its process ended with code 3"),
    ],
)
def test_run_when_the_reward_fails_on_the_first_row_then_exit_code_1_and_nothing_started(
    folder: Path, reward: str, said: str
) -> None:
    began = time.monotonic()
    done = areal("run", *write(folder, reward), cwd=folder, timeout=110.0)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.startswith(f"areal: reward: {said}")
    assert len(done.stderr.splitlines()) == 1
    if "ended with code" not in said:
        assert f"recipe.py:{REWARD_LINE})" in done.stderr
    assert "nothing was started" in done.stderr
    assert not (folder / "runs").exists()
    assert time.monotonic() - began < 110.0


def test_check_when_a_stage_fails_then_exit_code_1_with_the_traceback(folder: Path) -> None:
    done = areal("check", *write(folder, "return data['nothing']"), cwd=folder)
    assert done.returncode == 1
    assert "reward_fn raised KeyError: 'nothing'" in " ".join(done.stdout.split())
    assert "    return data['nothing']" in done.stdout
    assert "s, nothing was started" in done.stdout
    assert areal("check", "nowhere.py", cwd=folder).returncode == 2


def test_run_when_the_recipe_makes_its_model_then_it_is_checked_before_any_service_starts(
    folder: Path,
) -> None:
    arguments = write(folder, "return None")
    with (folder / "recipe.py").open("a") as recipe:
        recipe.write(
            "\ndef prepare_model(config):\n"
            "    from pathlib import Path\n"
            "    Path('model').rename(config.model.path)\n"
        )
    stack = RunningStack(folder / "runs" / "experiment" / "trial0")
    try:
        done = areal("run", *arguments, "model.path=made", cwd=folder)
        stack.assert_gone()
    finally:
        stack.clean_up()
    assert done.returncode == 1, done.stdout + done.stderr
    assert "reward: reward_fn returned None: expected a finite number" in done.stdout
    assert sorted(file.stem for file in (stack.run_dir / "logs").iterdir()) == [
        "launcher",
        "prepare",
    ]


# A shell's `&`, nohup and CI systems start programs with SIGINT ignored.
@pytest.mark.parametrize("disposition", [signal.SIG_DFL, signal.SIG_IGN])
def test_check_when_interrupted_then_its_process_ends_too(
    folder: Path, disposition: signal.Handlers
) -> None:
    marker = folder / "pid"
    reward = f"open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(3600)"
    arguments = ["check", *write(folder, reward), "reward.timeout_s=600"]
    process = subprocess.Popen(
        areal_argv(*arguments),
        cwd=folder,
        env=environment(),
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, disposition),
    )
    try:
        deadline = time.monotonic() + 90
        while not (marker.exists() and marker.read_text()):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        process.kill()
        process.wait(60)
    left = Path(f"/proc/{marker.read_text()}")
    eventually(lambda: not left.exists(), "the end of the recipe's process", 60.0)


def test_check_when_it_is_the_example_then_all_its_stages_are_ok(folder: Path) -> None:
    recipe = str(ROOT / "examples" / "arithmetic_grpo.py")
    done = areal("check", recipe, "model.path=model", "--json", cwd=folder)
    findings = json.loads(done.stdout)
    assert [each["verdict"] for each in findings] == ["ok"] * 8, findings
    later = areal("check", recipe, "model.path=elsewhere", "--json", cwd=folder)
    assert later.returncode == 0
    assert [each["verdict"] for each in json.loads(later.stdout)] == ["ok", "unknown"]

"""The tutorial's files, as they stand in docs/tutorial.md, are checked, trained and continued."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "tutorial.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that a reader has copied."""
    text = TUTORIAL.read_text()
    files: dict[str, str] = {}
    name = ""
    for before, language, block in re.findall(r"(.*?)```(\w*)\n(.*?)```\n", text, flags=re.DOTALL):
        if named := re.findall(r"`(mine/[\w.]+)`:\s*$", before):
            name = named[-1]
        if language in {"python", "yaml"}:
            files[name] = files.get(name, "") + block + "\n\n"
    assert sorted(files) == ["mine/digits.py", "mine/digits.yaml", "mine/make_data.py"]
    (tmp_path / "mine").mkdir()
    for file, content in files.items():
        (tmp_path / file).write_text(content)
    return tmp_path


def execute(folder: Path, *command: str, timeout: float, code: int = 0) -> str:
    result = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(TUTORIAL.parents[1] / "services")},
        check=False,
    )
    assert result.returncode == code, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout + result.stderr


@pytest.mark.long
@pytest.mark.timeout(600)
def test_tutorial_when_followed_then_its_recipe_trains_and_continues(folder: Path) -> None:
    recipe = ("mine/digits.py", "--config", "mine/digits.yaml")
    execute(folder, "mine/make_data.py", timeout=60)
    execute(folder, "-m", "areal_launch.cli", "check", *recipe, timeout=120)
    summary = folder / "runs" / "digits" / "trial0" / "summary.json"

    steps = ("total_train_steps=2", "gconfig.n_samples=4")
    execute(folder, "-m", "areal_launch.cli", "run", *recipe, *steps, timeout=240)
    first = json.loads(summary.read_text())
    more = ("total_train_steps=3", "gconfig.n_samples=4", "--accept-changes")
    execute(folder, "-m", "areal_launch.cli", "run", *recipe, *more, timeout=240)
    second = json.loads(summary.read_text())
    assert (first["status"], second["status"]) == ("finished", "finished")
    assert (first["steps"], second["steps"]) == (2, 3)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_tutorial_when_trained_to_the_end_then_the_task_is_learned_as_the_page_says(
    folder: Path,
) -> None:
    """A tenth of random digits are right; the page shows one run's panel."""
    execute(folder, "mine/make_data.py", timeout=60)
    shown = execute(folder, "-m", "areal_launch.cli", "run", "mine/digits.py", timeout=1100)
    summary = json.loads((folder / "runs/digits/trial0/summary.json").read_text())
    before, after = summary["heldout_before"], summary["heldout_after"]
    assert before < 0.6
    assert after > 0.8
    assert summary["findings"] == []
    assert "will not learn" not in shown
    page = re.search(r"held-out +([\d.]+) → ([\d.]+)", TUTORIAL.read_text())
    assert page is not None
    assert abs(before - float(page[1])) < 0.15
    assert abs(after - float(page[2])) < 0.15


UPLOAD = "        actor.upload_weights(WeightUpdateMeta.from_disk())\n"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_tutorial_when_a_mistake_is_planted_then_it_is_named(folder: Path) -> None:
    execute(folder, "mine/make_data.py", timeout=60)
    recipe = folder / "mine" / "digits.py"
    right = recipe.read_text()
    run = ("-m", "areal_launch.cli", "run", "mine/digits.py")

    single = execute(folder, *run, "gconfig.n_samples=1", timeout=120, code=1)
    assert "gconfig.n_samples 1: expected 2 or more" in single
    assert not (folder / "runs").exists()

    forgotten = right.replace(UPLOAD, "")
    recipe.write_text(forgotten)
    line = 1 + forgotten.splitlines().index(
        "        batch = rollout.prepare_batch(dataloader, workflow=workflow)"
    )
    said = execute(folder, *run, "trial_name=forgotten", timeout=240, code=1)
    assert f"mine/digits.py:{line}: step 1 has a batch already" in " ".join(said.split())

    early = right.replace(UPLOAD, UPLOAD + "        return\n")
    recipe.write_text(early)
    steps = ("total_train_steps=3", "actor.optimizer.lr=30")
    said = execute(folder, *run, "trial_name=early", *steps, timeout=240, code=1)
    assert "main ended after 1 of 3 steps" in " ".join(said.split())
    summary = json.loads((folder / "runs/digits/early/summary.json").read_text())
    assert [each["rule"] for each in summary["findings"]] == ["learning_rate"]

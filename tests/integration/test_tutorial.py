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


def execute(folder: Path, *command: str, timeout: float) -> str:
    result = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": str(TUTORIAL.parents[1] / "services")},
        check=False,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return result.stdout


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
